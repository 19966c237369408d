"""Watch a JetStream bucket, through restarts of NATS and before the bucket exists."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import APIError, KeyWrongLastSequenceError
from nats.js.kv import KV_DEL, KV_OP, KV_PURGE, KeyValue

from shared.messaging.consumers import watching
from shared.messaging.mesh import Mesh

log = logging.getLogger(__name__)
_CHECK_S = 10.0
_CLUSTER_CHECK_S = 2.0
"""`_CHECK_S` with replicas: the consumer may be lost with a server other than the client's."""
_NEXT_S = 5.0
_RETRY_S = 0.3
_WRONG_LAST_SEQUENCE = (10071, 10164)
"""JetStream's codes for an expected sequence that is not the last one."""


class Copy(Protocol):
    """A mirror of a bucket."""

    def replace(self, entries: dict[str, bytes]) -> None:
        """Replace the mirror by the whole bucket."""

    def put(self, key: str, value: bytes) -> None: ...
    def remove(self, key: str) -> None: ...


class OwnWrites:
    """Writes of this process that its watcher has not delivered yet, the newest of each key.

    The copy applies them at once, and the watcher skips older entries of these keys.
    """

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, bytes | None]] = {}
        self._delivered = 0

    def record(self, key: str, value: bytes | None, revision: int) -> bool:
        """Record a write; False: the watcher has delivered it, and perhaps newer ones.

        Args:
            key: Of the entry.
            value: None: the entry was deleted.
            revision: What NATS returned for the write.
        """
        if revision <= self._delivered:
            return False
        self._pending[key] = (revision, value)
        return True

    def on_delivered(self, key: str, revision: int) -> bool:
        """Return True if the entry is not older than this process's latest write of it."""
        self._delivered = revision
        is_current = key not in self._pending or self._pending[key][0] <= revision
        if is_current:
            self._pending.pop(key, None)
        return is_current

    def on_snapshot(self, entries: dict[str, bytes], revision: int) -> dict[str, bytes]:
        """Return the entries of the bucket at `revision` with the writes since."""
        self._delivered = revision
        self._pending = {key: write for key, write in self._pending.items() if write[0] > revision}
        written = {key: value for key, (_, value) in self._pending.items()}
        return {key: value for key, value in (entries | written).items() if value is not None}


class BucketWatcher:
    """Reads the whole bucket, then its changes.

    A restarted server has lost the consumer, so each reconnection reads the whole bucket again. Any
    other missed change shows in the bucket's last revision, which is checked now and then.
    """

    def __init__(
        self,
        mesh: Mesh,
        bucket: Callable[[JetStreamContext, int], Awaitable[KeyValue]],
        copy: Copy,
        own_writes: OwnWrites | None = None,
    ) -> None:
        """Create a watcher.

        Args:
            mesh: The connection to NATS.
            bucket: Opens the bucket, for a number of replicas.
            copy: Gets the entries.
            own_writes: Those that `copy` gets from this process; None: it gets none.
        """
        self._mesh = mesh
        self._bucket = bucket
        self._copy = copy
        self._own_writes = own_writes or OwnWrites()
        self._revision = 0
        self._copied = 0
        """The newest revision that the copy has; during a snapshot it lags behind what was read."""
        self._followed: KeyValue | None = None
        self._advanced = asyncio.Event()
        self._catching_up = asyncio.Lock()
        self._caught_up_at = float("-inf")
        self._check_s = _CHECK_S if mesh.replicas == 1 else _CLUSTER_CHECK_S

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow()
            except (NatsError, TimeoutError, ConnectionError) as e:
                log.info("failed to read a bucket; retrying", extra={"error": repr(e)})
            await asyncio.sleep(_RETRY_S)

    async def catch_up(self, within_s: float) -> bool:
        """Wait until the copy has what was written before this call, or `within_s` seconds.

        Callers that wait at the same time share two questions to the server at most.

        Returns:
            True if the copy has it.
        """
        asked_at = time.monotonic()
        with contextlib.suppress(NatsError, TimeoutError, ConnectionError):  # the copy is all there is
            async with asyncio.timeout(within_s), self._catching_up:
                if self._caught_up_at >= asked_at or self._followed is None:
                    return self._followed is not None
                began_at = time.monotonic()
                newest = await _find_newest_revision(self._followed)
                while self._copied < newest:
                    self._advanced.clear()
                    await self._advanced.wait()
                self._caught_up_at = began_at
                return True
        return False

    async def _follow(self) -> None:
        reconnections = self._mesh.reconnections
        bucket = await self._bucket(self._mesh.nc.jetstream(timeout=2), self._mesh.replicas)
        async with watching(bucket) as watcher:
            await self._snapshot(bucket, watcher)
            self._followed = bucket
            self._note_copied()
            with self._mesh.on_reconnect(partial(_wake, watcher)):
                while self._mesh.reconnections == reconnections and not await self._apply_change(bucket, watcher):
                    pass

    async def _snapshot(self, bucket: KeyValue, watcher: Any) -> None:
        entries: dict[str, bytes] = {}

        def take(entry: KeyValue.Entry) -> None:
            self._revision = entry.revision or self._revision
            if entry.operation is None and entry.value:
                entries[entry.key] = entry.value
            else:
                entries.pop(entry.key, None)

        self._revision = 0
        while (entry := await watcher.updates(timeout=_NEXT_S)) is not None:
            take(entry)
        # An entry that is written at that moment follows the end of the snapshot.
        newest = await _find_newest_revision(bucket)
        while self._revision < newest:
            take(await watcher.updates(timeout=_NEXT_S))
        self._copy.replace(self._own_writes.on_snapshot(entries, self._revision))

    async def _apply_change(self, bucket: KeyValue, watcher: Any) -> bool:
        """Apply one change; return True if a change was missed.

        The bucket's last revision shows a missed change after a while.
        """
        try:
            entry = await watcher.updates(timeout=self._check_s)
        except TimeoutError:
            newest = await _find_newest_revision(bucket)
            return newest not in (0, self._revision) and watcher._updates.empty()
        if entry is None:
            return False
        self._revision = entry.revision or self._revision
        is_current = self._own_writes.on_delivered(entry.key, self._revision)
        if is_current and entry.operation is None and entry.value:
            self._copy.put(entry.key, entry.value)
        elif is_current and entry.operation in (KV_DEL, KV_PURGE):
            self._copy.remove(entry.key)
        self._note_copied()
        return False

    def _note_copied(self) -> None:
        self._copied = self._revision
        self._advanced.set()


async def create_entry(js: JetStreamContext, bucket: str, key: str, value: bytes, last: int) -> int:
    """Write an entry if nothing else was written to the bucket since, and return its revision.

    Args:
        js: The connection.
        bucket: Its name.
        key: Of the entry.
        value: Of the entry.
        last: The revision of the bucket's newest entry.

    Raises:
        KeyWrongLastSequenceError: The bucket has a newer entry.
    """
    try:
        return (await js.publish(f"$KV.{bucket}.{key}", value, headers={Header.EXPECTED_LAST_SEQUENCE: str(last)})).seq
    except APIError as e:
        if e.err_code in _WRONG_LAST_SEQUENCE:
            raise KeyWrongLastSequenceError(description=e.description) from e
        raise


async def delete_entry(js: JetStreamContext, bucket: str, key: str) -> int:
    """Delete an entry, and return the revision of that; `KeyValue.delete` does not."""
    return (await js.publish(f"$KV.{bucket}.{key}", headers={KV_OP: KV_DEL})).seq


def _wake(watcher: Any) -> None:
    """End the watcher's wait for a change."""
    if watcher._updates.empty():
        watcher._updates.put_nowait(None)


async def _find_newest_revision(bucket: KeyValue) -> int:
    """Return the revision of a bucket's newest entry; 0 for a bucket without entries.

    The revision of an expired entry still counts.
    """
    state = (await bucket.status()).stream_info.state
    return state.last_seq if state.messages else 0
