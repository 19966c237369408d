"""The LoRA adapters that an engine has in memory: loaded when a request first names one, shared by all that do, and let go again.

1. An adapter that is there is used at once.
2. Otherwise it is loaded, once for all who wait for it, as soon as its bytes fit into the budget. To make room, adapters that no request uses
   leave, the least recently used first.
3. If those in use leave too little, it waits for them; what comes later then waits behind it (after FAIR_AFTER_S even for adapters that are
   there), so that nothing starves.
4. One that is larger than the whole budget is refused.
5. One that nobody has used for the model's keep_alive leaves, and one that another revision has replaced as soon as nobody uses it.

The budget is part of the memory that the instance has reserved: what adapters take, keys and values may not (`domain/planning.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from services.engine.domain.step_planning import AdapterRoom
from services.engine.generation.lora_layers import Adapter
from shared.contracts.engine import LoadedAdapter
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory

log = logging.getLogger(__name__)
FAIR_AFTER_S = 2.0


class Shelf(Protocol):
    """Where adapters come from and go to."""

    async def load(self, card: ModelCard, number: int) -> Adapter:
        """The `number`th adapter of this engine. Raises `ThawError`, and then holds nothing."""

    async def drop(self, adapter: Adapter, number: int) -> None:
        """Nothing uses `adapter`; the caller keeps no reference. Returns when its memory is given back."""

    def grant(self, kv_blocks: int) -> None:
        """Keys and values may take so many blocks."""


@dataclass(eq=False)
class _Entry:
    card: ModelCard
    number: int
    adapter: Adapter | None = None
    loading: asyncio.Task[None] | None = None
    users: int = 0
    used_at: float = 0.0
    wanted: bool = True
    expiry: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return self.users == 0 and self.adapter is not None


class Adapters:
    """Lives on the event loop. `keep_s`: seconds an unused adapter stays; negative: until its room is needed."""

    def __init__(self, shelf: Shelf, room: AdapterRoom, keep_s: float, changed: Callable[[], None]) -> None:
        self._shelf = shelf
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

    def loaded(self) -> tuple[LoadedAdapter, ...]:
        there = (e for e in self._entries.values() if e.adapter is not None)
        return tuple(LoadedAdapter(name=e.card.name, nbytes=e.card.info.weights_bytes, active=e.users) for e in there)

    async def acquire(self, card: ModelCard) -> Adapter:
        """The adapter, loaded; to be given back by `release`. Raises `InsufficientMemory`, or why it cannot be loaded."""
        entry = self._entries.get(card.info.revision)
        if entry is None or self._others_waited_long():
            async with self._turn:
                entry = self._entries.get(card.info.revision) or await self._begin(card)
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
        """A request that had acquired the adapter is over."""
        self._unuse(self._entries[revision])

    def drop(self, name: str, keep: str = "") -> None:
        """Let go of the adapter's revisions but `keep`, unless a request uses them."""
        for entry in [e for e in self._entries.values() if e.card.name == name and e.card.info.revision != keep]:
            entry.wanted = False
            self._expire(entry)

    def _others_waited_long(self) -> bool:
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
            if not entry.wanted:
                self._expire(entry)
            elif self._keep_s >= 0 and self._entries.get(entry.card.info.revision) is entry:  # 5
                entry.expiry = loop.call_later(self._keep_s, self._expire, entry)
        self._changed()

    def _expire(self, entry: _Entry) -> None:
        if entry.idle:
            self._spawn(self._leave(entry), f"drop {entry.card.name}")

    async def _begin(self, card: ModelCard) -> _Entry:
        """Make room and start loading; one caller at a time."""
        self.drop(card.name, keep=card.info.revision)
        nbytes = card.info.weights_bytes
        if nbytes > self._room.budget:  # 4
            raise InsufficientMemory(
                f"the adapter {card.name} has {nbytes} bytes, and an instance of {card.spec.base} has {self._room.budget} for adapters: set "
                f"engine_args.adapter_cache_bytes of {card.spec.base} to {nbytes} or more"
            )
        self._waited_since = asyncio.get_running_loop().time()
        try:
            while self._used + nbytes > self._room.budget:
                self._freed.clear()
                idle = min((e for e in self._entries.values() if e.idle), key=lambda e: e.used_at, default=None)
                if idle is not None:  # 2
                    await self._leave(idle)
                else:  # 3
                    await self._freed.wait()
        finally:
            self._waited_since = None
        self._take(nbytes)
        entry = _Entry(card, next(self._numbers))
        entry.loading = self._spawn(self._load(entry), f"load {card.name}")
        self._entries[card.info.revision] = entry
        return entry

    async def _load(self, entry: _Entry) -> None:
        card = entry.card
        try:
            entry.adapter = await self._shelf.load(card, entry.number)
        except BaseException:
            del self._entries[card.info.revision]
            self._take(-card.info.weights_bytes)
            raise
        if entry.users == 0:  # who wanted it is gone
            self._use(entry)
            self._unuse(entry)
        log.info("loaded an adapter", extra={"adapter": card.name, "bytes": card.info.weights_bytes})
        self._changed()

    async def _leave(self, entry: _Entry) -> None:
        """Harmless if it has left, or is in use again."""
        if not entry.idle or entry.adapter is None:
            return
        del self._entries[entry.card.info.revision]
        if entry.expiry is not None:
            entry.expiry.cancel()
        dropping, entry.adapter = self._shelf.drop(entry.adapter, entry.number), None
        log.info("letting go of an adapter", extra={"adapter": entry.card.name})
        await dropping
        self._take(-entry.card.info.weights_bytes)
        self._changed()

    def _take(self, nbytes: int) -> None:
        """More (or fewer) bytes are adapters'."""
        self._used += nbytes
        self._freed.set()
        self._shelf.grant(self._room.kv_blocks(self._used))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("an adapter could not be loaded", extra={"error": str(error)})
