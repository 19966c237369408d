"""Adapters that requests wait for while the model itself is loaded: their weights come beside the model's.

Each is held for this instance from the moment that a gateway tells of it (`LoadAdapter`), within the memory that the instance has reserved for
keys and values, of which there are none yet. When the model is bound the adapters are attached as any, which joins what has come by then,
and the early holds are let go of. What does not fit, or cannot be read, is left to the request that asks for it: it hears why.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from services.engine.loader_client import Weights
from services.engine.lora.cache import Adapters
from shared.contracts.loader import adapter_holder
from shared.contracts.models import ModelCard
from shared.errors import ThawError

log = logging.getLogger(__name__)


@dataclass
class _Coming:
    card: ModelCard
    holder: str
    task: asyncio.Task[None]


class EarlyAdapters:
    """Lives on the event loop. `room_bytes`: what adapters may have before it is known what sequences need."""

    def __init__(self, weights: Weights, instance_id: str, room_bytes: int) -> None:
        self._weights, self._instance_id, self._room = weights, instance_id, room_bytes
        self._coming: dict[str, _Coming] = {}
        self._count = 0
        self._adapters: Adapters | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, card: ModelCard) -> None:
        """Have `card`'s weights come; once the model is bound, attach them."""
        revision = card.info.revision
        if self._adapters is not None:
            self._keep(asyncio.create_task(self._attach(self._adapters, card), name=f"attach {card.name}"))
        elif revision not in self._coming and card.info.weights_bytes <= self._room:
            self._room -= card.info.weights_bytes
            holder = adapter_holder(self._instance_id, -self._count)
            self._count += 1
            task = asyncio.create_task(self._bring(card, holder), name=f"bring {card.name}")
            self._coming[revision] = _Coming(card, holder, task)

    def drop(self, name: str) -> None:
        """The adapter is registered no longer."""
        for revision in [r for r, c in self._coming.items() if c.card.name == name]:
            coming = self._coming.pop(revision)
            self._room += coming.card.info.weights_bytes
            coming.task.cancel()
            self._keep(asyncio.create_task(self._weights.release(coming.holder), name=f"release {name}"))

    def bound(self, adapters: Adapters) -> None:
        """The model is: attach what has come, or is coming."""
        self._adapters = adapters
        for coming in self._coming.values():
            self._keep(asyncio.create_task(self._hand_over(adapters, coming), name=f"attach {coming.card.name}"))
        self._coming = {}

    async def _bring(self, card: ModelCard, holder: str) -> None:
        try:
            await self._weights.attach(card, holder, "index")  # the rest comes as long as it is held
        except ThawError as e:
            log.info("an adapter does not come beside its base", extra={"adapter": card.name, "reason": e.message})

    async def _hand_over(self, adapters: Adapters, coming: _Coming) -> None:
        try:
            await coming.task
            await self._attach(adapters, coming.card)
        finally:
            await self._weights.release(coming.holder)

    async def _attach(self, adapters: Adapters, card: ModelCard) -> None:
        try:
            await adapters.acquire(card)
        except Exception as e:  # the task's boundary: whatever it was, the request that asks for it hears of it
            log.info("an adapter is left to the request that asks for it", extra={"adapter": card.name, "reason": str(e)})
        else:
            adapters.release(card.info.revision)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
