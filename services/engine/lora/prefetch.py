"""Loads LoRA adapters while the engine still loads the base model.

A gateway names the adapter that a waiting request needs (`LoadAdapter`). The prefetcher attaches
its weights within the memory reserved for the KV cache, which is still empty. Once the model is
bound, the adapters move into the LoRA cache and the prefetcher releases its own holds. An adapter
that does not fit or cannot be read is left to its request, which receives the error.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from services.engine.generation.lora_layers import LoraAdapter
from services.engine.loader_client import LoaderClient
from shared.contracts.loader import adapter_holder
from shared.contracts.models import ModelCard
from shared.engines.adapter_cache import AdapterCache
from shared.errors import ThawError
from shared.tasks import end

log = logging.getLogger(__name__)


@dataclass
class _Prefetch:
    card: ModelCard
    holder: str
    task: asyncio.Task[None]


class LoraPrefetcher:
    """Runs on the event loop.

    Args:
        weights: Client of the node's loader.
        instance_id: The instance that holds the weights.
        room_bytes: Memory for adapters before the model is bound.
    """

    def __init__(self, weights: LoaderClient, instance_id: str, room_bytes: int) -> None:
        self._weights, self._instance_id, self._room = weights, instance_id, room_bytes
        self._prefetches: dict[str, _Prefetch] = {}
        self._count = 0
        self._adapters: AdapterCache[LoraAdapter] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def load(self, card: ModelCard) -> None:
        """Load `card`'s weights, and attach them once the model is bound."""
        if self._is_closed:
            return
        revision = card.info.revision
        if self._adapters is not None:
            self._keep(asyncio.create_task(self._adapters.load_ahead(card), name=f"attach {card.name}"))
        elif revision not in self._prefetches and card.info.weights_bytes <= self._room:
            self._room -= card.info.weights_bytes
            holder = adapter_holder(self._instance_id, -self._count)
            self._count += 1
            task = asyncio.create_task(self._prefetch(card, holder), name=f"prefetch {card.name}")
            self._prefetches[revision] = _Prefetch(card, holder, task)

    def drop(self, name: str) -> None:
        """Stop loading an adapter that is no longer registered."""
        for revision in [r for r, c in self._prefetches.items() if c.card.name == name]:
            prefetch = self._prefetches.pop(revision)
            self._room += prefetch.card.info.weights_bytes
            prefetch.task.cancel()
            self._keep(asyncio.create_task(self._weights.release(prefetch.holder), name=f"release {name}"))

    def on_model_bound(self, adapters: AdapterCache[LoraAdapter]) -> None:
        """Attach the prefetched adapters: the model is bound now."""
        self._adapters = adapters
        for prefetch in self._prefetches.values():
            self._keep(asyncio.create_task(self._attach_prefetched(adapters, prefetch), name=f"attach {prefetch.card.name}"))
        self._prefetches = {}

    async def close(self) -> None:
        """End all loads: the engine ends."""
        self._is_closed = True
        await end(*(prefetch.task for prefetch in self._prefetches.values()), *self._tasks)

    async def _prefetch(self, card: ModelCard, holder: str) -> None:
        try:
            await self._weights.attach(card, holder, "index")  # the loader loads the rest while this holder exists
        except ThawError as e:
            log.info("failed to prefetch an adapter", extra={"adapter": card.name, "reason": e.message})

    async def _attach_prefetched(self, adapters: AdapterCache[LoraAdapter], prefetch: _Prefetch) -> None:
        try:
            await prefetch.task
            await adapters.load_ahead(prefetch.card)
        finally:
            await self._weights.release(prefetch.holder)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
