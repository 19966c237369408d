"""Idempotency-Keys in JetStream: who answers for a key (a KV entry) and what the engine has said so far (a captured stream).

A key's entry is either `running`, owned by one claim that renews it while it works, or `done`. It names the subject on which the engine
answers; JetStream captures that subject, so that anybody can read the answer from its first message on, while it is made and after. An
entry that is not renewed for LEASE_S (on the waiter's own clock), or that has no owner, goes to the first waiter who replaces exactly
that revision. An attempt of which no client got anything removes its entry when it fails: the next request tries anew.
docs/adr/0011-idempotency.md and 0015 say why.
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
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.base import ErrorBody, Frozen
from shared.errors import ThawError, Unavailable
from shared.messaging import Mesh, consumers
from shared.messaging.bounds import full_as
from shared.messaging.streams import ensure_keyed_stream, idempotency_bucket

log = logging.getLogger(__name__)
_FULL = (
    "The store of Idempotency-Keys is full (256 MiB), so this request is not run: a repetition could not be told from it. "
    "Send it without the key, or lower THAW_IDEMPOTENCY_TTL on the gateways, so that keys expire sooner."
)
LEASE_S = 5.0
RENEW_S = 1.5
_STORED_WITHIN_S = 2.0
_LOOK_S = 0.05
_HERE_WITHIN_S = 1.0
_FOUND_WITHIN_S, _FIND_AGAIN_S = 20.0, 0.5


class Part(Frozen):
    """The first `messages` of what an engine said on `reply`: from there on another one went on."""

    reply: str
    messages: int


class Entry(Frozen):
    """What lies under a key. `request` is a digest of the body that came with it; `owner` names a claim, and is empty once a gateway that
    was stopped has handed the key over. `reply` is empty until an engine is about to be given the request. The answer is `parts` in their
    order, and then what comes on `reply`, from weights of `revision`. `error`: how the answer ended after `messages` messages of that, if it
    broke off."""

    state: Literal["running", "done"] = "running"
    request: str
    owner: str = ""
    renewals: int = 0
    answer_id: str
    created: int
    parts: tuple[Part, ...] = ()
    reply: str = ""
    revision: str = ""
    attempt_id: str = ""
    instance_id: str = ""
    node: str = ""
    messages: int = 0
    error: ErrorBody | None = None


class ClaimLost(Exception):
    """Another gateway has the key now."""


@contextmanager
def reachable() -> Iterator[None]:
    """Raise `Unavailable` for whatever the store's client raises: generating without the store could generate twice."""
    try:
        with full_as(_FULL):
            yield
    except (NatsError, TimeoutError, ValidationError) as e:
        raise Unavailable(f"the store of idempotency keys cannot be reached: {type(e).__name__}", should_retry=True) from e


def is_away(error: Exception) -> bool:
    """Whether the store did not answer, as while NATS restarts: what was asked may be asked again."""
    return isinstance(error, NatsError | TimeoutError) or isinstance(error.__cause__, NatsError | TimeoutError)


class Found:
    """A key that is there, at one revision."""

    def __init__(self, key: str, entry: Entry, revision: int) -> None:
        self.key = key
        self.entry = entry
        self.revision = revision


class Claim:
    """The right, and the duty, to answer for a key."""

    def __init__(self, bucket: KeyValue, key: str, entry: Entry, revision: int) -> None:
        self.key = key
        self.entry = entry
        self.lost = asyncio.Event()
        self._bucket = bucket
        self._revision = revision
        self._lock = asyncio.Lock()

    async def _write(self, **changes: Any) -> None:
        """Replace the entry. Raises `ClaimLost`, or what NATS raises."""
        async with self._lock:
            entry = self.entry.model_copy(update=changes)
            try:
                self._revision = await self._bucket.update(self.key, _bytes(entry), last=self._revision)
            except KeyWrongLastSequenceError:
                # An update that was written although its confirmation was lost is still ours.
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

    async def renew_forever(self) -> None:
        """Keep the claim until cancelled, or lost."""
        while not self.lost.is_set():
            await asyncio.sleep(RENEW_S)
            try:
                await self._write(renewals=self.entry.renewals + 1)
            except ClaimLost:
                log.warning("another gateway took over an idempotency key")
            except (NatsError, TimeoutError) as e:
                log.info("an idempotency key could not be renewed", extra={"error": repr(e)})

    async def sending(
        self, reply: str, attempt_id: str, instance_id: str, node: str, revision: str = "", parts: tuple[Part, ...] = ()
    ) -> None:
        """Write down who is about to be asked, before it is, and after which parts it goes on."""
        await self._write(reply=reply, attempt_id=attempt_id, instance_id=instance_id, node=node, revision=revision, parts=parts)

    async def done(self, messages: int, error: ThawError | None) -> None:
        await self._write(state="done", messages=messages, error=error.body() if error is not None else None)

    async def hand_over(self) -> None:
        """Let whoever waits, or comes next, go on with it."""
        await self._write(owner="")

    async def drop(self) -> None:
        """Forget the key."""
        async with self._lock:
            try:
                await self._bucket.delete(self.key, last=self._revision)
            except KeyWrongLastSequenceError:
                await self._bucket.delete(self.key, last=await self._own_revision())


class IdempotencyStore:
    def __init__(self, mesh: Mesh, gateway: str, ttl_s: float, max_bytes: int) -> None:
        self._mesh = mesh
        self._gateway = gateway
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

    def _mine(self, entry: Entry) -> Entry:
        return entry.model_copy(update={"owner": f"{self._gateway}:{uuid.uuid4().hex}"})

    async def find(self, key: str, fresh: Entry) -> Claim | Found:
        """Become the one who answers for `key`, or learn who is. Waits for a store that is away, as while NATS restarts, for `_FOUND_WITHIN_S`.

        Raises `Unavailable`.
        """
        mine, until = self._mine(fresh), time.monotonic() + _FOUND_WITHIN_S
        with reachable():
            while True:
                try:
                    return await self._find(key, mine)
                except (NatsError, TimeoutError):
                    self._bucket = None
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(_FIND_AGAIN_S)

    async def _find(self, key: str, mine: Entry) -> Claim | Found:
        bucket = await self._open()
        while True:
            try:
                return Claim(bucket, key, mine, await bucket.create(key, _bytes(mine)))
            except KeyWrongLastSequenceError:
                pass
            try:
                there = await bucket.get(key)
            except KeyNotFoundError:
                continue
            if there.value is not None and there.revision is not None:
                entry = Entry.model_validate_json(there.value)
                # One that was created although its confirmation was lost is ours.
                own = entry.owner == mine.owner
                return Claim(bucket, key, entry, there.revision) if own else Found(key, entry, there.revision)

    async def take_over(self, found: Found) -> Claim | None:
        """Replace an owner who is gone; None if somebody else has been faster, or he is not gone after all."""
        bucket, mine = await self._open(), self._mine(found.entry)
        try:
            return Claim(bucket, found.key, mine, await bucket.update(found.key, _bytes(mine), last=found.revision))
        except KeyWrongLastSequenceError:
            return None

    async def forget(self, found: Found) -> None:
        """Remove an entry whose answer is not there any more."""
        try:
            await (await self._open()).delete(found.key, last=found.revision)
        except KeyWrongLastSequenceError:
            log.info("an idempotency key changed while it was to be forgotten")

    @asynccontextmanager
    async def watching(self, key: str) -> AsyncIterator[Any]:
        async with consumers.watching(await self._open(), key) as watcher:
            yield watcher

    # What engines said.

    async def stored(self, reply: str) -> int:
        """How many messages of an engine's answer are kept."""
        info = await self._js.stream_info(subjects.KEYED_STREAM, subjects_filter=reply)
        return int((info.state.subjects or {}).get(reply, 0))

    async def until_stored(self, reply: str, messages: int) -> bool:
        """Whether the answer's last message has been captured, which takes no time but while NATS restarts."""
        async with asyncio.timeout(_STORED_WITHIN_S):
            while await self.stored(reply) < messages:  # noqa: ASYNC110 - what is waited for happens in the NATS server
                await asyncio.sleep(_LOOK_S)
        return True

    async def follow(self, reply: str, take: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        """Have `take` called with every message of an answer, from the first one on; returns what ends that."""

        async def on_message(message: Msg) -> None:
            take(message.data)

        subscription = await self._js.subscribe(reply, cb=on_message, stream=subjects.KEYED_STREAM, ordered_consumer=True)

        return functools.partial(consumers.end, subscription)

    # Who waits.

    @asynccontextmanager
    async def waiting(self, key: str) -> AsyncIterator[None]:
        """Answer the owner's question whether anybody waits, while the block runs; and tell it of the end."""

        async def here(message: Msg) -> None:
            await message.respond(b"")

        nc = self._mesh.nc
        subscription = await nc.subscribe(subjects.keyed_waiters(key), cb=here)
        try:
            yield
        finally:
            if nc.is_connected:
                await subscription.unsubscribe()
                await nc.publish(subjects.keyed_left(key))

    async def anybody_waits(self, key: str) -> bool:
        """Nobody listening is an answer, and an immediate one."""
        try:
            await self._mesh.nc.request(subjects.keyed_waiters(key), timeout=_HERE_WITHIN_S)
        except NoRespondersError:
            return False
        except (NatsError, TimeoutError) as e:
            log.info("could not ask who waits for an idempotency key", extra={"error": repr(e)})
            return False
        return True

    @asynccontextmanager
    async def told_of_leaving(self, key: str, tell: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        async def left(_: Msg) -> None:
            await tell()

        subscription = await self._mesh.nc.subscribe(subjects.keyed_left(key), cb=left)
        try:
            yield
        finally:
            if self._mesh.nc.is_connected:
                await subscription.unsubscribe()


def _bytes(entry: Entry) -> bytes:
    return entry.model_dump_json().encode()


def digest(*parts: bytes) -> str:
    """One name for several byte strings, whatever they hold."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()
