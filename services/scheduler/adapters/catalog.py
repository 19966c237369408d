"""The catalogue of models in NATS' key-value store: what gateways watch. Postgres is its source; the leader writes it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.errors import BadRequestError, KeyNotFoundError, NoKeysError, ServiceUnavailableError
from nats.js.kv import KeyValue
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.models import ModelCard
from shared.messaging.streams import catalog_bucket, ensure_trace_stream

log = logging.getLogger(__name__)


class JetStreamMissing(NatsError):
    """The NATS server keeps no streams: Thaw needs JetStream for its catalogue and traces."""


async def ensure_streams(js: JetStreamContext) -> None:
    """Make the stream of traces and the bucket of models unless they are there."""
    try:
        await ensure_trace_stream(js)
        await catalog_bucket(js)
    except BadRequestError as e:
        log.warning("a stream exists with another configuration; it is left as it is", extra={"error": str(e)})
    except (ServiceUnavailableError, NoRespondersError) as e:
        raise JetStreamMissing(
            "JetStream does not answer: start nats-server with -js (or a jetstream block), then this leads"
        ) from e


class Catalog:
    def __init__(self, js: JetStreamContext) -> None:
        self._js = js
        self._bucket: KeyValue | None = None

    async def _open(self) -> KeyValue:
        if self._bucket is None:
            self._bucket = await catalog_bucket(self._js)
        return self._bucket

    async def put(self, card: ModelCard) -> None:
        await (await self._open()).put(subjects.token(card.name), card.model_dump_json().encode())

    async def delete(self, name: str) -> None:
        await (await self._open()).delete(subjects.token(name))

    async def read(self) -> dict[str, ModelCard]:
        """What is there now, by key; an unreadable entry is left out."""
        bucket = await self._open()
        found = {}
        try:
            keys = await bucket.keys()
        except NoKeysError:
            keys = []
        for key in keys:
            try:
                entry = await bucket.get(key)
                found[key] = ModelCard.model_validate_json(entry.value or b"")
            except (KeyNotFoundError, ValidationError):
                continue
        return found

    async def reconcile(self, cards: Iterable[ModelCard]) -> None:
        """Make the bucket hold exactly `cards`; what is right already is not written again."""
        bucket = await self._open()
        wanted = {subjects.token(c.name): c for c in cards}
        present = await self.read()
        try:
            keys = set(await bucket.keys())
        except NoKeysError:
            keys = set()
        for key in keys - set(wanted):
            await bucket.delete(key)
        for key, card in wanted.items():
            if present.get(key) != card:
                await bucket.put(key, card.model_dump_json().encode())
