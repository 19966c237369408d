"""Store of idempotency keys in JetStream: KV entries and captured replies.

An entry is either `running`, owned by one claim that renews it while it works, or `done`. It names
the subject on which the engine replies. JetStream captures that subject, so that any gateway can
read the response from its first message on, during generation and afterwards.

An entry that is not renewed for `LEASE_S` (on the waiter's own clock), or that has no owner, goes
to the first waiter that replaces exactly that revision. An attempt of which no client received
output deletes its entry when it fails, so that the next request starts again. See
docs/adr/0011-idempotency.md and docs/adr/0015.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.base import ErrorBody, Frozen
from shared.errors import ThawError, Unavailable
from shared.messaging import Mesh, consumers
from shared.messaging.full_stores import full_as
from shared.messaging.streams import ensure_keyed_stream, idempotency_bucket
from shared.tasks import end

log = logging.getLogger(__name__)
_FULL = (
    "The store of Idempotency-Keys is full (256 MiB), so the request cannot be deduplicated and is not run. "
    "Send it without the key, or lower THAW_IDEMPOTENCY_TTL on the gateways, so that keys expire sooner."
)
LEASE_S = 5.0
RENEW_S = 1.5
_MARKER_AFTER_S = 0.25
_CAPTURE_TIMEOUT_S = 2.0
"""Missing messages count as lost this long after the stream has stored a later message."""
_CAPTURE_LIMIT_S = 60.0
"""Limit of the wait for a stream that falls behind its disk."""
_CAPTURE_POLL_S = 0.05
_READ_TIMEOUT_S = 10.0
_WAITERS_TIMEOUT_S = 1.0
_CLAIM_TIMEOUT_S, _CLAIM_RETRY_S = 20.0, 0.5


class ResponsePart(Frozen):
    """The first `messages` messages on `reply`; another engine continued from there."""

    reply: str
    messages: int


class Entry(Frozen):
    """The value of a key.

    The response consists of `parts` in their order, then of the messages on `reply`.

    Attributes:
        request: Digest of the request's body and query.
        owner: Name of the claim; empty once a stopping gateway has released the key.
        reply: Reply subject of the present attempt; empty until an instance is chosen.
        revision: Revision of the weights of the present attempt.
        messages: Messages on `reply`, once the entry is `done`.
        error: The error of a response that broke off.
    """

    state: Literal["running", "done"] = "running"
    request: str
    owner: str = ""
    renewals: int = 0
    answer_id: str
    created: int
    parts: tuple[ResponsePart, ...] = ()
    reply: str = ""
    revision: str = ""
    attempt_id: str = ""
    instance_id: str = ""
    node: str = ""
    messages: int = 0
    error: ErrorBody | None = None


class ClaimLost(Exception):
    """Another gateway has claimed the key."""


@contextmanager
def store_errors_as_unavailable() -> Iterator[None]:
    """Raise `Unavailable` for every error of the store.

    Generating without the store could generate twice.
    """
    try:
        with full_as(_FULL):
            yield
    except (NatsError, TimeoutError, ValidationError) as e:
        raise Unavailable(
            f"The store of idempotency keys cannot be reached ({type(e).__name__}). Repeat the request", should_retry=True
        ) from e


def is_store_unavailable(error: Exception) -> bool:
    """True if the store did not reply, as during a restart of NATS; a retry may help."""
    return isinstance(error, NatsError | TimeoutError) or isinstance(error.__cause__, NatsError | TimeoutError)


class ExistingKey:
    """The entry of a key at one revision."""

    def __init__(self, key: str, entry: Entry, revision: int) -> None:
        self.key = key
        self.entry = entry
        self.revision = revision


class Claim:
    """Ownership of a key: the right and the duty to execute its request.

    Attributes:
        is_taken_over: Another gateway owned the key before.
        lost: Set when another gateway has claimed the key.
    """

    def __init__(self, bucket: KeyValue, key: str, entry: Entry, revision: int, *, is_taken_over: bool = False) -> None:
        self.key = key
        self.entry = entry
        self.is_taken_over = is_taken_over
        self.lost = asyncio.Event()
        self._bucket = bucket
        self._revision = revision
        self._lock = asyncio.Lock()

    async def _write(self, **changes: Any) -> None:
        """Update fields of the entry. Raises `ClaimLost`, or the error of NATS."""
        async with self._lock:
            entry = self.entry.model_copy(update=changes)
            try:
                self._revision = await self._bucket.update(self.key, _bytes(entry), last=self._revision)
            except KeyWrongLastSequenceError:
                # The previous update may have been written although its confirmation was lost.
                self._revision = await self._bucket.update(self.key, _bytes(entry), last=await self._own_revision())
            self.entry = entry

    async def _own_revision(self) -> int:
        try:
            found = await self._bucket.get(self.key)
        except KeyNotFoundError as e:
            self.lost.set()
            raise ClaimLost from e
        if found.value is None or found.revision is None or Entry.model_validate_json(found.value).owner != self.entry.owner:
            self.lost.set()
            raise ClaimLost
        return found.revision

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the claim inside the block, until it is lost."""
        renewing = asyncio.create_task(self._renew(), name="idempotency lease")
        try:
            yield
        finally:
            await end(renewing)

    async def _renew(self) -> None:
        """Renew the claim until it is cancelled or lost."""
        while not self.lost.is_set():
            await asyncio.sleep(RENEW_S)
            try:
                await self._write(renewals=self.entry.renewals + 1)
            except ClaimLost:
                log.warning("another gateway claimed an idempotency key")
            except (NatsError, TimeoutError) as e:
                log.info("failed to renew an idempotency key", extra={"error": repr(e)})

    async def record_attempt(
        self, reply: str, attempt_id: str, instance_id: str, node: str, revision: str = "", parts: tuple[ResponsePart, ...] = ()
    ) -> None:
        """Record an attempt, and the parts that it continues, before it is sent."""
        await self._write(reply=reply, attempt_id=attempt_id, instance_id=instance_id, node=node, revision=revision, parts=parts)

    async def complete(self, messages: int, error: ThawError | None) -> None:
        """Record that the response has `messages` messages, and how it failed."""
        await self._write(state="done", messages=messages, error=error.body() if error is not None else None)

    async def release(self) -> None:
        """Give the key up for the next gateway that waits for it."""
        await self._write(owner="")

    async def release_parts(self, parts: tuple[ResponsePart, ...]) -> None:
        """Give the key up for the next gateway, which continues the response after `parts`."""
        await self._write(owner="", reply="", parts=parts)

    async def delete(self) -> None:
        """Delete the key."""
        async with self._lock:
            try:
                await self._bucket.delete(self.key, last=self._revision)
            except KeyWrongLastSequenceError:
                await self._bucket.delete(self.key, last=await self._own_revision())


class IdempotencyStore:
    """Keys, captured replies and waiters, for one gateway."""

    def __init__(self, mesh: Mesh, gateway_id: str, ttl_s: float, max_bytes: int) -> None:
        self._mesh = mesh
        self._gateway_id = gateway_id
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._bucket: KeyValue | None = None

    @property
    def _js(self) -> JetStreamContext:
        return self._mesh.nc.jetstream(timeout=3)

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            await ensure_keyed_stream(self._js, self._ttl_s, self._max_bytes, self._mesh.replicas)
            self._bucket = await idempotency_bucket(self._js, self._ttl_s, self._mesh.replicas)
        return self._bucket

    def _with_owner(self, entry: Entry) -> Entry:
        return entry.model_copy(update={"owner": f"{self._gateway_id}:{uuid.uuid4().hex}"})

    async def claim_or_get(self, key: str, new_entry: Entry) -> Claim | ExistingKey:
        """Claim `key` with `new_entry`, or return the entry that it has.

        Retries for `_CLAIM_TIMEOUT_S` while the store is unavailable.

        Raises:
            Unavailable: The store stayed unavailable, or is full.
        """
        owned, until = self._with_owner(new_entry), time.monotonic() + _CLAIM_TIMEOUT_S
        with store_errors_as_unavailable():
            while True:
                try:
                    return await self._claim_or_get(key, owned)
                except (NatsError, TimeoutError):
                    self._bucket = None
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(_CLAIM_RETRY_S)

    async def _claim_or_get(self, key: str, owned: Entry) -> Claim | ExistingKey:
        bucket = await self._open()
        while True:
            try:
                return Claim(bucket, key, owned, await bucket.create(key, _bytes(owned)))
            except KeyWrongLastSequenceError:
                pass
            try:
                found = await bucket.get(key)
            except KeyNotFoundError:
                continue
            if found.value is not None and found.revision is not None:
                entry = Entry.model_validate_json(found.value)
                # The entry may have been created although its confirmation was lost.
                if entry.owner == owned.owner:
                    return Claim(bucket, key, entry, found.revision)
                return ExistingKey(key, entry, found.revision)

    async def take_over(self, found: ExistingKey) -> Claim | None:
        """Claim a key whose owner is gone; None if the entry has changed meanwhile."""
        bucket, owned = await self._open(), self._with_owner(found.entry)
        try:
            revision = await bucket.update(found.key, _bytes(owned), last=found.revision)
            return Claim(bucket, found.key, owned, revision, is_taken_over=True)
        except KeyWrongLastSequenceError:
            return None

    async def delete(self, found: ExistingKey) -> None:
        """Delete an entry whose response is gone; no-op if the entry has changed."""
        try:
            await (await self._open()).delete(found.key, last=found.revision)
        except KeyWrongLastSequenceError:
            log.info("idempotency key changed before it could be deleted")

    @asynccontextmanager
    async def watch(self, key: str) -> AsyncIterator[Any]:
        """Watch the entry of a key."""
        async with consumers.watching(await self._open(), key) as watcher:
            yield watcher

    # Captured replies of engines.

    async def captured_messages(self, reply: str) -> int:
        """Count the stored messages of a reply subject."""
        info = await self._js.stream_info(subjects.KEYED_STREAM, subjects_filter=reply)
        return int((info.state.subjects or {}).get(reply, 0))

    async def wait_until_captured(self, reply: str, messages: int) -> bool:
        """Wait until `messages` messages are stored; immediate while NATS keeps up.

        A stream stores messages in the order in which they arrive, so a message that is still
        missing once a marker is stored is lost. The stream stores nothing of what is published
        while its replicas elect a leader.

        Returns:
            False if NATS lost some of them.
        """
        began = time.monotonic()
        marked_at: float | None = None
        while await self.captured_messages(reply) < messages:
            now = time.monotonic()
            if now - began > _CAPTURE_LIMIT_S or (marked_at is not None and now - marked_at > _CAPTURE_TIMEOUT_S):
                return False
            if marked_at is None and now - began > _MARKER_AFTER_S and await self._store_marker():
                marked_at = time.monotonic()
            await asyncio.sleep(_CAPTURE_POLL_S)
        return True

    async def _store_marker(self) -> bool:
        """Store a message of no reply; false if the stream did not confirm it."""
        try:
            await self._js.publish(subjects.keyed_marker(self._gateway_id), b"{}", stream=subjects.KEYED_STREAM)
        except (NatsError, TimeoutError) as e:
            log.info("failed to store a marker after captured replies", extra={"error": repr(e)})
            return False
        return True

    async def stored_messages(self, reply: str) -> list[bytes]:
        """Return the messages of a reply subject that are stored now, in their order.

        Raises:
            TimeoutError: The stream could not be read within `_READ_TIMEOUT_S`.
        """
        if not await self.captured_messages(reply):
            return []
        found: list[bytes] = []
        has_last = asyncio.Event()

        async def take(message: Msg) -> None:
            found.append(message.data)
            if message.metadata.num_pending == 0:
                has_last.set()

        subscription = await self._js.subscribe(reply, cb=take, stream=subjects.KEYED_STREAM, ordered_consumer=True)
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                await has_last.wait()
        finally:
            await consumers.end(subscription)
        return found

    async def read_captured(self, reply: str, on_message: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        """Call `on_message` with every message of a reply subject, from the first one on.

        Returns:
            A function that ends the subscription.
        """

        async def take(message: Msg) -> None:
            on_message(message.data)

        subscription = await self._js.subscribe(reply, cb=take, stream=subjects.KEYED_STREAM, ordered_consumer=True)

        return functools.partial(consumers.end, subscription)

    # Waiters.

    @asynccontextmanager
    async def announce_waiter(self, key: str) -> AsyncIterator[None]:
        """Reply to the owner's `has_waiters` inside the block, and notify it at the end."""

        async def confirm(message: Msg) -> None:
            await message.respond(b"")

        nc = self._mesh.nc
        subscription = await nc.subscribe(subjects.keyed_waiters(key), cb=confirm)
        try:
            yield
        finally:
            if nc.is_connected:
                await subscription.unsubscribe()
                await nc.publish(subjects.keyed_left(key))

    async def has_waiters(self, key: str) -> bool:
        """True if another client waits; NATS replies at once if none does.

        A gateway that has subscribed and does not reply in time is slow: its client still waits.
        """
        try:
            await self._mesh.nc.request(subjects.keyed_waiters(key), timeout=_WAITERS_TIMEOUT_S)
        except NoRespondersError:
            return False
        except NatsTimeoutError:
            return True
        except NatsError as e:
            log.info("failed to query the waiters of an idempotency key", extra={"error": repr(e)})
            return False
        return True

    @asynccontextmanager
    async def on_waiter_left(self, key: str, callback: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Call `callback` whenever a waiter leaves, inside the block."""

        async def on_left(_: Msg) -> None:
            await callback()

        subscription = await self._mesh.nc.subscribe(subjects.keyed_left(key), cb=on_left)
        try:
            yield
        finally:
            if self._mesh.nc.is_connected:
                await subscription.unsubscribe()


def _bytes(entry: Entry) -> bytes:
    return entry.model_dump_json().encode()


def digest(*parts: bytes) -> str:
    """Hash several byte strings; their boundaries count."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()
