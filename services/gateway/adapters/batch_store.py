"""Records of files and batches: a JetStream bucket with one entry for each API key.

An entry is replaced by compare-and-set, so that gateways that change it at the same time lose
nothing. Every gateway has a copy of the bucket, and finds the active batches there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from weakref import WeakValueDictionary

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.gateway.adapters.file_store import FileStore, errors_as_unavailable
from services.gateway.domain.batches.batch import Batch
from services.gateway.domain.batches.owner_state import OwnerState, expire_files
from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.messaging.full_stores import full_as
from shared.messaging.streams import batches_bucket

log = logging.getLogger(__name__)
ANONYMOUS = "anonymous"
"""Owner of the files of clients without a key."""
LEASE = "runner"
LEASE_S = 5.0
RENEW_S = 1.5
_MAX_CONFLICTS = 50
_MAX_UNCONFIRMED = 3
"""Writes of one change that NATS may leave unconfirmed."""
_CONFIRM_S = 10.0
"""Time to find out whether an unconfirmed write was made."""
_RETRY_S = 0.2
_FULL = "The store of batches is full. Delete files, or wait until some expire"


class BatchMirror:
    """The active batches of all keys, as the bucket's watcher last saw them."""

    def __init__(self) -> None:
        self._active: dict[str, tuple[Batch, ...]] = {}
        self.changed = asyncio.Event()

    def active(self) -> list[tuple[str, Batch]]:
        """Return the active batches with their owners, oldest first."""
        found = [(owner, batch) for owner, batches in self._active.items() for batch in batches]
        return sorted(found, key=lambda pair: (pair[1].created_at, pair[1].id))

    def replace(self, entries: dict[str, bytes]) -> None:
        self._active.clear()
        for key, value in entries.items():
            self.put(key, value)
        self.changed.set()

    def put(self, key: str, value: bytes) -> None:
        if key == LEASE:
            return
        try:
            state = OwnerState.model_validate_json(value)
        except ValidationError:
            log.warning("the record of a key's batches cannot be read; they are not run", extra={"owner": key[:12]})
            state = OwnerState()
        self._active[key] = tuple(batch for batch in state.batches if batch.is_active)
        self.changed.set()

    def remove(self, key: str) -> None:
        self._active.pop(key, None)
        self.changed.set()


class BatchStore:
    """The records of all API keys, as one gateway reads and changes them.

    All methods raise `Unavailable` if NATS cannot be reached.
    """

    def __init__(self, mesh: Mesh, files: FileStore) -> None:
        self._mesh = mesh
        self._files = files
        self._bucket: KeyValue | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.mirror = BatchMirror()

    async def read(self, owner: str) -> OwnerState:
        """Return the files and batches of a key; expired files are not among them."""
        state, _ = await self._read_within(owner, 0.0)
        return expire_files(state, int(time.time()))

    async def change(self, owner: str, change: Callable[[OwnerState], OwnerState]) -> OwnerState:
        """Replace the record of a key; returns the new one.

        The content of files that are no longer in it is removed. Raises the exceptions of `change`.

        Args:
            owner: The key.
            change: Makes the next record. It may get a record that has its change already, which it
                returns unchanged: NATS has made a write that it did not confirm.

        Raises:
            StoreFull: There is no room for the record.
        """
        lock = self._locks.setdefault(owner, asyncio.Lock())
        async with lock:
            files: set[str] = set()
            unconfirmed: list[OwnerState] = []
            for _ in range(_MAX_CONFLICTS):
                before, revision = await self._read_within(owner, _CONFIRM_S if unconfirmed else 0.0)
                files |= {file.id for file in before.files}
                after = before if before in unconfirmed else change(expire_files(before, int(time.time())))
                if after != before:
                    try:
                        await self._write(owner, after, revision)
                    except Unavailable as e:
                        if isinstance(e.__cause__, KeyWrongLastSequenceError):
                            continue
                        if not isinstance(e.__cause__, TimeoutError) or len(unconfirmed) >= _MAX_UNCONFIRMED:
                            raise
                        unconfirmed.append(after)  # a client that repeats its request would make a second batch
                        continue
                for removed in files - {file.id for file in after.files}:
                    await self._remove_content(owner, removed)
                return after
        raise Unavailable("Other gateways change the files of this API key too often. Repeat the request", should_retry=True)

    async def _write(self, owner: str, state: OwnerState, revision: int) -> None:
        """Replace the record, if it still has the revision."""
        with errors_as_unavailable(), full_as(_FULL):
            await (await self._open()).update(owner, state.model_dump_json(exclude_defaults=True).encode(), last=revision)

    async def _remove_content(self, owner: str, file_id: str) -> None:
        """Remove the content of a file that is no longer in the record; a failure is logged."""
        try:
            await self._files.remove(owner, file_id)
        except Unavailable as e:  # the change is made, and the content expires by itself
            log.warning("failed to remove the content of a file", extra={"file": file_id, "error": e.message})

    async def _read_within(self, owner: str, within_s: float) -> tuple[OwnerState, int]:
        """Read a record and its revision, again for so many seconds while NATS does not answer."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                with errors_as_unavailable():
                    return await self._get(owner)
            except Unavailable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _get(self, entry: str) -> tuple[OwnerState, int]:
        try:
            found = await (await self._open()).get(entry)
        except KeyNotFoundError as e:
            deleted = getattr(e, "entry", None)
            return OwnerState(), (deleted.revision or 0) if deleted is not None else 0
        return OwnerState.model_validate_json(found.value or b"{}"), found.revision or 0

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await batches_bucket(self._mesh.nc.jetstream(timeout=5), self._mesh.replicas)
        return self._bucket

    async def lease_bucket(self) -> KeyValue:
        """Return the bucket, which has the lease of the gateway that runs batches too."""
        with errors_as_unavailable():
            return await self._open()


class RunnerLease:
    """The lease of the gateway that runs the batches of all keys.

    A lease that is not renewed for `LEASE_S`, measured on the waiting gateway's clock, goes to the
    first gateway that replaces exactly that revision.
    """

    def __init__(self, store: BatchStore, gateway_id: str) -> None:
        self._store = store
        self._own = gateway_id.encode()
        self._seen_revision = 0
        self._seen_at = 0.0

    async def hold(self, now: float) -> bool:
        """Acquire or renew the lease; False if another gateway has it. Raises `Unavailable`."""
        bucket = await self._store.lease_bucket()
        with errors_as_unavailable():
            try:
                found = await bucket.get(LEASE)
                holder, revision = found.value or b"", found.revision or 0
            except KeyNotFoundError as e:
                deleted = getattr(e, "entry", None)
                holder, revision = b"", (deleted.revision or 0) if deleted is not None else 0
            if holder not in (b"", self._own):
                if revision != self._seen_revision:
                    self._seen_revision, self._seen_at = revision, now
                if now - self._seen_at < LEASE_S:
                    return False
            try:
                await bucket.update(LEASE, self._own, last=revision)
            except KeyWrongLastSequenceError:
                return False
        return True

    async def release(self) -> None:
        """Free the lease for other gateways, if this gateway has it. Raises `Unavailable`."""
        bucket = await self._store.lease_bucket()
        with errors_as_unavailable():
            try:
                found = await bucket.get(LEASE)
                if found.value == self._own:
                    await bucket.update(LEASE, b"", last=found.revision)
            except (KeyNotFoundError, KeyWrongLastSequenceError):
                return
