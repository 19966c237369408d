"""Store of responses of the Responses API: a JetStream bucket that every gateway reads.

The entry `OWNER.RESPONSE` has the response and its conversation; `OWNER.index` lists the responses
of one API key, whose digest is OWNER. A response is in the index once its entry is written, so that
no other gateway removes it before. See docs/adr/0075-stored-responses.md.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from nats.errors import Error as NatsError
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from services.gateway.domain.stored_responses import (
    ResponseIndex,
    StorageBounds,
    StoredResponse,
    add_response,
    remove_response,
)
from shared.errors import Unavailable
from shared.messaging import Mesh
from shared.messaging.streams import responses_bucket

log = logging.getLogger(__name__)
_INDEX = "index"
_ANONYMOUS = "anonymous"
_VALID_ID = re.compile(r"resp_[0-9a-f]{32}")
_ENVELOPE_BYTES = 4096
"""Bytes of a NATS message that are kept for its subject and headers."""
_MAX_VALUE_BYTES = 4 * 1024 * 1024
"""A gateway encodes this in less than 50 ms."""
_MAX_CONFLICTS = 50
"""Attempts to change an index that other gateways change at the same time."""
_STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class StoredValue:
    """A response and the items of its conversation, each in JSON without line breaks."""

    response: bytes
    items: bytes


class ResponseStore:
    """The stored responses of all API keys, as one gateway accesses them."""

    def __init__(self, mesh: Mesh, bounds: StorageBounds) -> None:
        self._mesh = mesh
        self._bounds = bounds
        self._bucket: KeyValue | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def accepts(self, size_bytes: int) -> bool:
        """True if responses are stored, and one of `size_bytes` is not too large."""
        limit = min(self._mesh.max_body - _ENVELOPE_BYTES, self._bounds.size_bytes, _MAX_VALUE_BYTES)
        return self._bounds.count > 0 and size_bytes <= limit

    async def put(self, owner: str, response_id: str, stored: StoredValue) -> bool:
        """Store a response.

        Args:
            owner: Digest of the API key; empty for clients without one.

        Returns:
            False if it could not be stored: it is too large, or the store is full or unreachable.
        """
        value = stored.response + b"\n" + stored.items
        if not self.accepts(len(value)):
            return False
        new = StoredResponse(id=response_id, size_bytes=len(value), stored_at=time.time())
        try:
            async with asyncio.timeout(_STORE_TIMEOUT_S):
                bucket = await self._open()
                await bucket.put(_entry(owner, response_id), value)
                removed = await self._change_index(owner, lambda index: add_response(index, new, self._bounds))
                await asyncio.gather(*(bucket.delete(_entry(owner, name)) for name in removed))
        except (NatsError, TimeoutError, ValidationError, Unavailable) as e:
            self._bucket = None
            log.warning("failed to store a response; its client is informed by `store`", extra={"error": repr(e)})
            return False
        return True

    async def get(self, owner: str, response_id: str) -> StoredValue | None:
        """Return a stored response; None if this key has none of this id.

        Raises:
            Unavailable: The store cannot be reached.
        """
        if not _VALID_ID.fullmatch(response_id):
            return None
        with _errors_as_unavailable():
            try:
                found = await (await self._open()).get(_entry(owner, response_id))
            except KeyNotFoundError:
                return None
        response, _, items = (found.value or b"").partition(b"\n")
        return StoredValue(response, items)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response. Returns False if this key has none of this id.

        Raises:
            Unavailable: The store cannot be reached.
        """
        if await self.get(owner, response_id) is None:
            return False
        with _errors_as_unavailable():
            await (await self._open()).delete(_entry(owner, response_id))
            await self._change_index(owner, lambda index: (remove_response(index, response_id), ()))
        return True

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            js = self._mesh.nc.jetstream(timeout=3)
            self._bucket = await responses_bucket(js, self._bounds.age_s, self._mesh.replicas)
        return self._bucket

    async def _change_index(
        self, owner: str, change: Callable[[ResponseIndex], tuple[ResponseIndex, tuple[str, ...]]]
    ) -> tuple[str, ...]:
        """Replace the index of a key; returns what `change` returns besides the new index.

        Requests of this gateway change it one after another, and those of other gateways are
        detected by the revision.

        Raises:
            Unavailable: Other gateways changed it at every attempt.
        """
        bucket, entry = await self._open(), _entry(owner, _INDEX)
        lock = self._locks.setdefault(owner, asyncio.Lock())
        async with lock:
            for _ in range(_MAX_CONFLICTS):
                index, revision = await _read_index(bucket, entry)
                changed, removed = change(index)
                try:
                    await bucket.update(entry, changed.model_dump_json().encode(), last=revision)
                except KeyWrongLastSequenceError:
                    continue
                return removed
        raise Unavailable("Other gateways change the stored responses of this API key too often. Repeat the request")


async def _read_index(bucket: KeyValue, entry: str) -> tuple[ResponseIndex, int]:
    try:
        found = await bucket.get(entry)
    except KeyNotFoundError as e:
        deleted = getattr(e, "entry", None)
        return ResponseIndex(), (deleted.revision or 0) if deleted is not None else 0
    return ResponseIndex.model_validate_json(found.value or b"{}"), found.revision or 0


def _entry(owner: str, name: str) -> str:
    return f"{owner or _ANONYMOUS}.{name}"


@contextmanager
def _errors_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (NatsError, APIError, TimeoutError, ValidationError) as e:
        raise Unavailable(
            f"The stored responses cannot be reached ({type(e).__name__}). Repeat the request", should_retry=True
        ) from e
