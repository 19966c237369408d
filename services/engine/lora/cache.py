"""The LoRA adapters that an engine holds in memory.

The first request that names an adapter loads it; later requests share it.

1. A cached adapter is used at once.
2. Any other adapter is loaded once for all waiting requests, as soon as its bytes fit the budget.
   To make room the cache evicts unused adapters, least recently used first.
3. If adapters in use leave too little room, the request waits. Later requests queue behind it,
   after `FAIR_AFTER_S` even those for cached adapters, so that no request starves.
4. An adapter larger than the whole budget is refused.
5. An adapter unused for the model's keep_alive is evicted; an outdated revision is evicted as soon
   as no request uses it.

The budget is part of the memory that the instance has reserved: adapters take memory from the KV
cache (`domain/step_planning.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from services.engine.domain.step_planning import LoraBudget
from services.engine.generation.lora_layers import LoraAdapter
from shared.contracts.engine import LoadedAdapter
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory

log = logging.getLogger(__name__)
FAIR_AFTER_S = 2.0


class LoraSource(Protocol):
    """Loads and unloads adapters."""

    async def load(self, card: ModelCard, number: int) -> LoraAdapter:
        """Load an adapter.

        `number` is unique within this engine. Raises `ThawError`, after releasing everything.
        """

    async def drop(self, adapter: LoraAdapter, number: int) -> None:
        """Unload an adapter that no request uses, and return when its memory is free.

        The caller keeps no reference.
        """

    def grant(self, kv_blocks: int) -> None:
        """Set the number of blocks that the KV cache may use."""


@dataclass(eq=False)
class _Entry:
    card: ModelCard
    number: int
    adapter: LoraAdapter | None = None
    loading: asyncio.Task[None] | None = None
    users: int = 0
    used_at: float = 0.0
    is_registered: bool = True
    expiry: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return self.users == 0 and self.adapter is not None


class LoraCache:
    """Adapters by revision. Runs on the event loop.

    Args:
        source: Loads and unloads adapters.
        room: The memory that adapters and the KV cache share.
        keep_s: Seconds that an unused adapter stays; negative: until its memory is needed.
        changed: Called when the loaded adapters or their users change.
    """

    def __init__(self, source: LoraSource, room: LoraBudget, keep_s: float, changed: Callable[[], None]) -> None:
        self._source = source
        self._room = room
        self._keep_s = keep_s
        self._changed = changed
        self._entries: dict[str, _Entry] = {}
        self._used = 0
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._waited_since: float | None = None
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def list_loaded(self) -> tuple[LoadedAdapter, ...]:
        there = (e for e in self._entries.values() if e.adapter is not None)
        return tuple(LoadedAdapter(name=e.card.name, nbytes=e.card.info.weights_bytes, active=e.users) for e in there)

    async def acquire(self, card: ModelCard) -> LoraAdapter:
        """Return the loaded adapter. The caller gives it back with `release`.

        Raises:
            InsufficientMemory: The adapter is larger than the budget.
            ThawError: The adapter cannot be loaded.
        """
        entry = self._entries.get(card.info.revision)
        if entry is None or self._must_queue():
            async with self._turn:
                entry = self._entries.get(card.info.revision) or await self._start_load(card)
                self._use(entry)
        else:
            self._use(entry)
        try:
            if entry.loading is not None:
                await asyncio.shield(entry.loading)
        except BaseException:
            self._unuse(entry)
            raise
        assert entry.adapter is not None
        return entry.adapter

    def release(self, revision: str) -> None:
        """Give back an adapter after a request has ended."""
        self._unuse(self._entries[revision])

    def drop(self, name: str, keep: str = "") -> None:
        """Evict the adapter's revisions except `keep`, as soon as no request uses them."""
        for entry in [e for e in self._entries.values() if e.card.name == name and e.card.info.revision != keep]:
            entry.is_registered = False
            self._expire(entry)

    def _must_queue(self) -> bool:
        since = self._waited_since
        return since is not None and asyncio.get_running_loop().time() - since > FAIR_AFTER_S

    def _use(self, entry: _Entry) -> None:
        entry.users += 1
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        self._changed()

    def _unuse(self, entry: _Entry) -> None:
        loop = asyncio.get_running_loop()
        entry.users -= 1
        entry.used_at = loop.time()
        if entry.users == 0:
            self._freed.set()
            if not entry.is_registered:
                self._expire(entry)
            elif self._keep_s >= 0 and self._entries.get(entry.card.info.revision) is entry:  # 5
                entry.expiry = loop.call_later(self._keep_s, self._expire, entry)
        self._changed()

    def _expire(self, entry: _Entry) -> None:
        if entry.idle:
            self._spawn(self._evict(entry), f"drop {entry.card.name}")

    async def _start_load(self, card: ModelCard) -> _Entry:
        """Make room and start loading. One caller at a time."""
        self.drop(card.name, keep=card.info.revision)
        nbytes = card.info.weights_bytes
        if nbytes > self._room.budget:  # 4
            raise InsufficientMemory(
                f"The adapter {card.name} has {nbytes} bytes, and an instance of {card.spec.base} has {self._room.budget} for adapters. Set "
                f"engine_args.adapter_cache_bytes of {card.spec.base} to {nbytes} or more"
            )
        self._waited_since = asyncio.get_running_loop().time()
        try:
            while self._used + nbytes > self._room.budget:
                self._freed.clear()
                idle = min((e for e in self._entries.values() if e.idle), key=lambda e: e.used_at, default=None)
                if idle is not None:  # 2
                    await self._evict(idle)
                else:  # 3
                    await self._freed.wait()
        finally:
            self._waited_since = None
        self._account(nbytes)
        entry = _Entry(card, next(self._numbers))
        entry.loading = self._spawn(self._load(entry), f"load {card.name}")
        self._entries[card.info.revision] = entry
        return entry

    async def _load(self, entry: _Entry) -> None:
        card = entry.card
        try:
            entry.adapter = await self._source.load(card, entry.number)
        except BaseException:
            del self._entries[card.info.revision]
            self._account(-card.info.weights_bytes)
            raise
        if entry.users == 0:  # the request was cancelled while the adapter was loading
            self._use(entry)
            self._unuse(entry)
        log.info("loaded an adapter", extra={"adapter": card.name, "bytes": card.info.weights_bytes})
        self._changed()

    async def _evict(self, entry: _Entry) -> None:
        """Unload an idle adapter.

        Adapters that are in use or already evicted are left alone.
        """
        if not entry.idle or entry.adapter is None:
            return
        del self._entries[entry.card.info.revision]
        if entry.expiry is not None:
            entry.expiry.cancel()
        dropping, entry.adapter = self._source.drop(entry.adapter, entry.number), None
        log.info("evicting an adapter", extra={"adapter": entry.card.name})
        await dropping
        self._account(-entry.card.info.weights_bytes)
        self._changed()

    def _account(self, nbytes: int) -> None:
        """Add `nbytes` (negative: subtract) to the memory that adapters take."""
        self._used += nbytes
        self._freed.set()
        self._source.grant(self._room.kv_blocks(self._used))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("failed to load an adapter", extra={"error": str(error)})
