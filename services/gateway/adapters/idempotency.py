"""Answers kept under an Idempotency-Key, in a JetStream bucket that all gateways share; touched only when a request has such a key.

A key's entry is either `running`, owned by one gateway that renews it while it works, or `done`, with the answer in parts beside it.
Whoever finds it running waits for its change. If it is not renewed for LEASE_S (on the waiter's own clock) its owner is dead, and the
first waiter to replace exactly that revision becomes the owner. A failed attempt removes its entry: the next one tries anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from nats.errors import Error as NatsError
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import Field, ValidationError

from shared.contracts.base import Frozen
from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.messaging.streams import idempotency_bucket

log = logging.getLogger(__name__)
LEASE_S = 5.0
RENEW_S = 1.5
MAX_ANSWER_BYTES = 8 * 1024 * 1024
PART_BYTES = 512 * 1024


class Entry(Frozen):
    """What lies under a key. `request` is a digest of the body that came with it."""

    state: Literal["running", "done"]
    request: str
    gateway: str = ""
    renewals: int = 0
    parts: int = 0
    status: int = 200
    headers: dict[str, str] = Field(default_factory=dict)


class Answer(Frozen):
    """A whole answer as it went to the first client."""

    status: int
    headers: dict[str, str]
    body: bytes


class Claim:
    """The right, and the duty, to answer for a key."""

    def __init__(self, bucket: KeyValue, key: str, entry: Entry, revision: int) -> None:
        self._bucket = bucket
        self._key = key
        self._entry = entry
        self._revision = revision

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Keep the claim while the block runs."""
        task = asyncio.create_task(self._renew(), name="idempotency lease")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._entry = self._entry.model_copy(update={"renewals": self._entry.renewals + 1})
            try:
                self._revision = await self._bucket.update(self._key, _bytes(self._entry), last=self._revision)
            except KeyWrongLastSequenceError:
                log.warning("another gateway took over an idempotency key; the request may be generated twice")
                return
            except (NatsError, TimeoutError) as e:
                log.info("an idempotency key could not be renewed", extra={"error": repr(e)})

    async def keep(self, answer: Answer) -> None:
        """Store the answer for whoever comes with the key."""
        parts = [answer.body[i : i + PART_BYTES] for i in range(0, len(answer.body), PART_BYTES)]
        done = self._entry.model_copy(
            update={"state": "done", "parts": len(parts), "status": answer.status, "headers": answer.headers}
        )
        for number, part in enumerate(parts):
            await self._bucket.put(f"{self._key}.{number}", part)
        await self._bucket.update(self._key, _bytes(done), last=self._revision)

    async def drop(self) -> None:
        await self._bucket.delete(self._key, last=self._revision)


class IdempotencyStore:
    def __init__(self, mesh: Mesh, gateway: str, ttl_s: float) -> None:
        self._mesh = mesh
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._bucket: KeyValue | None = None

    async def claim(self, key: str, request: str) -> Claim | Answer | None:
        """Become the one who answers (`Claim`), or wait for the answer. None: the key was used with another body.

        Raises `Unavailable` if the bucket cannot be reached: generating without it could generate twice.
        """
        try:
            bucket = self._bucket = self._bucket or await idempotency_bucket(self._mesh.nc.jetstream(timeout=3), self._ttl_s)
            while True:
                mine = Entry(state="running", request=request, gateway=self._gateway)
                try:
                    return Claim(bucket, key, mine, await bucket.create(key, _bytes(mine)))
                except KeyWrongLastSequenceError:
                    found = await self._wait(bucket, key, mine)
                if found is not None:
                    return found if not isinstance(found, Entry) else None
        except (NatsError, TimeoutError, ValidationError) as e:
            self._bucket = None
            raise Unavailable(f"the store of idempotency keys cannot be reached: {type(e).__name__}", should_retry=True) from e

    async def _wait(self, bucket: KeyValue, key: str, mine: Entry) -> Claim | Answer | Entry | None:
        """Follow a key that is there: its answer, a claim taken over, the entry if it is another request's, or None when it is gone."""
        watcher: Any = await bucket.watch(key)  # its methods carry no types
        try:
            entry, revision = mine, 0
            while True:
                try:
                    update = await watcher.updates(timeout=LEASE_S)
                except TimeoutError:
                    with contextlib.suppress(KeyWrongLastSequenceError):
                        return Claim(bucket, key, mine, await bucket.update(key, _bytes(mine), last=revision))
                    return None
                if update is None:
                    if not revision:
                        return None
                    continue
                if update.operation is not None:
                    return None
                entry, revision = Entry.model_validate_json(update.value), update.revision
                if entry.request != mine.request:
                    return entry
                if entry.state == "done":
                    return await _read(bucket, key, entry)
        finally:
            await watcher.stop()


async def _read(bucket: KeyValue, key: str, entry: Entry) -> Answer | None:
    parts = []
    for number in range(entry.parts):
        try:
            parts.append((await bucket.get(f"{key}.{number}")).value or b"")
        except KeyNotFoundError:
            await bucket.delete(key)
            return None
    return Answer(status=entry.status, headers=entry.headers, body=b"".join(parts))


def _bytes(entry: Entry) -> bytes:
    return entry.model_dump_json().encode()


def digest(*parts: bytes) -> str:
    """One name for several byte strings, whatever they hold."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()
