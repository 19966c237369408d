"""The model catalogue in NATS' key-value store, which gateways watch.

Postgres is its source; the leader writes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
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
    """Writes the bucket, and fills it again if JetStream has lost it or its last changes."""

    def __init__(self, js: JetStreamContext, replicas: int = 1) -> None:
        self._js = js
        self._replicas = replicas
        self._bucket: KeyValue | None = None
        self._created: datetime | None = None
        """Creation time of the bucket that was opened last."""
        self._last_seq = 0
        """Sequence number of the last known change; a bucket below it is an earlier state."""
        self._is_filled = True
        """False: the bucket may differ from `_cards`."""
        self._cards: dict[str, ModelCard] = {}
        """The cards that the bucket is to have, by model."""
        self._unwritten: dict[str, ModelCard] = {}
        """Cards that the bucket lacks: being written, or without room."""

    async def put(self, card: ModelCard) -> None:
        """Write a card.

        Raises:
            StoreFull: The bucket is full. The card is written once a removal makes room.
        """
        self._cards[card.name] = self._unwritten[card.name] = card
        with self._opened_again_after_errors():
            await self._write(await self._open(), card)

    async def delete(self, name: str) -> None:
        self._cards.pop(name, None)
        self._unwritten.pop(name, None)
        with self._opened_again_after_errors():
            bucket = await self._open()
            await self._delete(bucket, subjects.token(name))
            for card in list(self._unwritten.values()):
                try:
                    await self._write(bucket, card)
                except StoreFull:
                    return

    async def reconcile(self, cards: Iterable[ModelCard]) -> None:
        """Make the bucket contain exactly `cards`, writing differences only."""
        self._cards = {c.name: c for c in cards}
        self._is_filled = False
        await self.check()

    async def check(self) -> None:
        """Create the bucket again and fill it, if JetStream has lost it or its entries."""
        self._bucket = None
        await self._open()

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            bucket = await catalog_bucket(self._js, self._replicas, owner=self._created is None)
            info = (await bucket.status()).stream_info
            if self._created is not None and self._is_lost(info):
                log.warning("JetStream has lost the catalogue; writing it again", extra={"models": len(self._cards)})
                self._is_filled = False
            self._last_seq = info.state.last_seq
            if not self._is_filled:
                await self._write_differences(bucket)
                self._is_filled = True
            self._created = info.created
            self._bucket = bucket
        return self._bucket

    def _is_lost(self, info: StreamInfo) -> bool:
        """True if the bucket is another one, or lacks entries or changes."""
        written = len(self._cards) - len(self._unwritten)
        return info.created != self._created or info.state.messages < written or info.state.last_seq < self._last_seq

    @contextmanager
    def _opened_again_after_errors(self) -> Iterator[None]:
        try:
            yield
        except (NatsError, TimeoutError):
            self._bucket = None
            raise

    async def _write(self, bucket: KeyValue, card: ModelCard) -> None:
        with full_as(_FULL.format(name=card.name)):
            self._last_seq = await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
        self._unwritten.pop(card.name, None)

    async def _delete(self, bucket: KeyValue, key: str) -> None:
        await bucket.delete(key)
        self._last_seq += 1  # a deletion is an entry, too

    async def read(self) -> dict[str, ModelCard]:
        """Return the present cards by key, without unreadable entries."""
        found = {}
        for key, value in (await _read_entries(await self._open())).items():
            try:
                found[key] = ModelCard.model_validate_json(value)
            except ValidationError:
                continue
        return found

    async def _write_differences(self, bucket: KeyValue) -> None:
        present = await _read_entries(bucket)
        wanted = {subjects.token(c.name): c for c in self._cards.values()}
        for key in present.keys() - wanted.keys():
            await self._delete(bucket, key)
        self._unwritten = {c.name: c for key, c in wanted.items() if key not in present}
        for number, (key, card) in enumerate(wanted.items()):
            if present.get(key) != card.model_dump_json().encode():
                try:
                    await self._write(bucket, card)
                except StoreFull as e:
                    self._unwritten[card.name] = card
                    log.error("failed to write a model to the catalogue", extra={"model": card.name, "error": e.message})
            elif number % _AT_A_STRETCH == 0:
                await asyncio.sleep(0)


async def _read_entries(bucket: KeyValue) -> dict[str, bytes]:
    """Read the whole bucket as one stream: one request per key takes seconds for ten thousand
    models.
    """
    found: dict[str, bytes] = {}
    async with watching(bucket, ignore_deletes=True) as watcher:
        while (entry := await watcher.updates(timeout=_NEXT_ENTRY_S)) is not None:
            found[entry.key] = entry.value or b""
    return found
