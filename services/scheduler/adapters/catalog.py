"""The model catalogue in NATS' key-value store, which gateways watch.

Postgres is its source; the leader writes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.errors import ServiceUnavailableError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.models import ModelCard
from shared.errors import StoreFull
from shared.messaging.consumers import watching
from shared.messaging.full_stores import full_as
from shared.messaging.streams import catalog_bucket, ensure_trace_stream

log = logging.getLogger(__name__)
_FULL = (
    "The catalogue of models is full (64 MiB): {name} is registered, but cannot be served. "
    "Remove models that are not used, with `thaw models rm NAME`; it is served as soon as there is room."
)
_NEXT_ENTRY_S = 5.0
_AT_A_STRETCH = 100
"""Cards compared before other tasks of the process run."""


class JetStreamMissing(NatsError):
    """The NATS server keeps no streams: Thaw needs JetStream for its catalogue and traces."""


async def ensure_streams(js: JetStreamContext, replicas: int = 1) -> None:
    """Create the trace stream and the model bucket if they are missing."""
    try:
        await ensure_trace_stream(js, replicas)
        await catalog_bucket(js, replicas, owner=True)
    except (ServiceUnavailableError, NoRespondersError) as e:
        raise JetStreamMissing("JetStream does not answer. Start nats-server with -js (or a jetstream block)") from e


class Catalog:
    def __init__(self, js: JetStreamContext, replicas: int = 1) -> None:
        self._js = js
        self._replicas = replicas
        self._bucket: KeyValue | None = None
        self._unwritten: dict[str, ModelCard] = {}
        """Cards without room in the bucket, by model."""

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await catalog_bucket(self._js, self._replicas, owner=True)
        return self._bucket

    async def put(self, card: ModelCard) -> None:
        """Write a card.

        Raises:
            StoreFull: The bucket is full. The card is written once a removal makes room.
        """
        with full_as(_FULL.format(name=card.name)):
            self._unwritten[card.name] = card
            await (await self._open()).put(subjects.token(card.name), card.model_dump_json().encode())
            del self._unwritten[card.name]

    async def delete(self, name: str) -> None:
        self._unwritten.pop(name, None)
        await (await self._open()).delete(subjects.token(name))
        for card in list(self._unwritten.values()):
            try:
                await self.put(card)
            except StoreFull:
                return

    async def read(self) -> dict[str, ModelCard]:
        """Return the present cards by key, without unreadable entries."""
        found = {}
        for key, value in (await self._entries()).items():
            try:
                found[key] = ModelCard.model_validate_json(value)
            except ValidationError:
                continue
        return found

    async def _entries(self) -> dict[str, bytes]:
        """Read the whole bucket as one stream: one request per key takes seconds for ten thousand
        models.
        """
        found: dict[str, bytes] = {}
        async with watching(await self._open(), ignore_deletes=True) as watcher:
            while (entry := await watcher.updates(timeout=_NEXT_ENTRY_S)) is not None:
                found[entry.key] = entry.value or b""
        return found

    async def reconcile(self, cards: Iterable[ModelCard]) -> None:
        """Make the bucket contain exactly `cards`, writing differences only."""
        bucket = await self._open()
        present = await self._entries()
        wanted = {subjects.token(c.name): c for c in cards}
        for key in present.keys() - wanted.keys():
            await bucket.delete(key)
        for number, (key, card) in enumerate(wanted.items()):
            value = card.model_dump_json().encode()
            if present.get(key) != value:
                try:
                    await self.put(card)
                except StoreFull as e:
                    log.error("failed to write a model to the catalogue", extra={"model": card.name, "error": e.message})
            elif number % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)
