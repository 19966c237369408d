"""Follows the bucket of model cards, through restarts of NATS and before anybody has made it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from nats.errors import Error as NatsError
from nats.js.kv import KV_DEL, KV_PURGE, KeyValue
from pydantic import ValidationError

from services.gateway.service import Gateway
from shared.contracts import subjects
from shared.contracts.models import ModelCard
from shared.messaging import Mesh
from shared.messaging.streams import catalog_bucket

log = logging.getLogger(__name__)
_CHECK_S = 2.0
_RETRY_S = 0.3


class CatalogWatcher:
    """Reads the whole bucket, then its changes. A change that a restart swallowed shows in the bucket's last revision."""

    def __init__(self, mesh: Mesh, gateway: Gateway) -> None:
        self._mesh = mesh
        self._gateway = gateway
        self._revision = 0
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow()
            except (NatsError, TimeoutError, ConnectionError) as e:
                log.info("the catalogue cannot be read now; trying again", extra={"error": repr(e)})
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        bucket = await catalog_bucket(self._mesh.nc.jetstream(timeout=2))
        watcher: Any = await bucket.watchall()  # its methods carry no types
        try:
            await self._snapshot(watcher)
            while not await self._behind(bucket, watcher):
                pass
        finally:
            if self._mesh.nc.is_connected:
                await watcher.stop()

    async def _snapshot(self, watcher: Any) -> None:
        cards: dict[str, ModelCard] = {}
        self._revision = 0
        while (entry := await watcher.updates(timeout=5)) is not None:
            self._revision = entry.revision or self._revision
            card = _card(entry)
            if card is not None:
                cards[card.name] = card
        for name in self._gateway.catalog.replace(cards):
            self._gateway.on_model_removed(name)
        self._gateway.catalog.complete = True
        self.ready.set()

    async def _behind(self, bucket: KeyValue, watcher: Any) -> bool:
        """Take over one change, or see after a while that there was one which did not come."""
        try:
            entry = await watcher.updates(timeout=_CHECK_S)
        except TimeoutError:
            status = await bucket.status()
            last = status.stream_info.state.last_seq
            return last != self._revision and watcher._updates.empty()
        if entry is None:
            return False
        self._revision = entry.revision or self._revision
        card = _card(entry)
        if card is not None:
            self._gateway.catalog.put(card)
        elif entry.operation in (KV_DEL, KV_PURGE):
            name = subjects.untoken(entry.key)
            if self._gateway.catalog.remove(name):
                self._gateway.on_model_removed(name)
        return False


def _card(entry: KeyValue.Entry) -> ModelCard | None:
    if entry.operation is not None or not entry.value:
        return None
    try:
        return ModelCard.model_validate_json(entry.value)
    except ValidationError as e:
        log.warning("a model card cannot be understood", extra={"key": entry.key, "error": str(e)})
        return None
