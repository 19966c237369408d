"""Loads LoRA adapters from the node's loader.

They are mapped from shared memory, without a copy on the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from services.engine.generation.batcher import Batcher
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.loader_client import LoaderClient
from shared.contracts.loader import WeightsAttached, adapter_holder
from shared.contracts.models import ModelCard


class LoaderLoraSource:
    """An `AdapterSource` backed by the loader.

    Args:
        instance_id: The instance that holds the weights.
        weights: Client of the node's loader.
        batcher: The computing thread, which must stop using an adapter before it is unloaded.
        bind: Builds an adapter from attached weights; runs in `threads`.
        threads: Executor for `bind`.
    """

    def __init__(
        self,
        instance_id: str,
        weights: LoaderClient,
        batcher: Batcher,
        bind: Callable[[ModelCard, WeightsAttached], LoraAdapter],
        threads: Executor,
    ) -> None:
        self._instance_id = instance_id
        self._weights = weights
        self._batcher = batcher
        self._bind = bind
        self._threads = threads

    async def load(self, card: ModelCard, number: int) -> LoraAdapter:
        holder = adapter_holder(self._instance_id, number)
        try:
            attached = await self._weights.attach(card, holder, "complete")
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._bind, card, attached)
        except BaseException:
            await self._weights.release(holder)
            raise

    async def drop(self, adapter: LoraAdapter, number: int) -> None:
        loop = asyncio.get_running_loop()
        forgotten = asyncio.Event()

        def on_forgotten() -> None:
            loop.call_soon_threadsafe(forgotten.set)

        self._batcher.forget(adapter, on_forgotten)
        del adapter  # the loader frees only unmapped memory
        await forgotten.wait()
        await self._weights.release(adapter_holder(self._instance_id, number))
