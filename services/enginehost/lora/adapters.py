"""The LoRA adapters of one hosted engine, from the start of its host to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client
from services.enginehost.lora.source import AdapterSlots, HostedAdapterSource
from shared.contracts.models import ModelCard
from shared.engines.adapter_cache import AdapterCache


class HostedAdapters:
    """The cache of a running engine, and the adapters that requests wait for while it starts.

    Args:
        fetch: As of `HostedAdapterSource`.
        make_directory: As of `HostedAdapterSource`.
        keep_s: Seconds that an unused adapter stays; negative: until its slot is needed.
        changed: Called when the loaded adapters or their users change.
    """

    def __init__(
        self,
        fetch: Callable[[ModelCard], Awaitable[Path]],
        make_directory: Callable[[], Path],
        keep_s: float,
        changed: Callable[[], None],
    ) -> None:
        self._fetch, self._make_directory = fetch, make_directory
        self._keep_s, self._changed = keep_s, changed
        self._source: HostedAdapterSource | None = None
        self._cache: AdapterCache[str] | None = None
        self._wanted: dict[str, ModelCard] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, driver: Driver, client: Client) -> AdapterCache[str] | None:
        """Return the cache of an engine that has started; None if it serves no adapters."""
        if not driver.adapter_slots:
            return None
        self._source = HostedAdapterSource(driver, client, self._fetch, self._make_directory)
        slots = AdapterSlots(driver.adapter_slots)
        self._cache = AdapterCache(self._source, slots, self._keep_s, self._changed)
        for card in self._wanted.values():
            self._begin_load(self._cache, card)
        return self._cache

    def load(self, card: ModelCard) -> None:
        """Load an adapter that requests wait for, as soon as the engine has started."""
        if self._cache is None:
            self._wanted[card.name] = card
        else:
            self._begin_load(self._cache, card)

    def drop(self, name: str) -> None:
        """Unload an adapter that is no longer registered, once no request uses it."""
        self._wanted.pop(name, None)
        if self._cache is not None:
            self._cache.drop(name)

    def close(self) -> None:
        """Release everything, after the engine has ended. Calling it again has no effect."""
        for task in list(self._tasks):
            task.cancel()
        if self._source is not None:
            self._source.close()

    def _begin_load(self, cache: AdapterCache[str], card: ModelCard) -> None:
        task = asyncio.create_task(cache.load_ahead(card), name=f"load {card.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
