"""The LoRA adapters that an engine holds in memory.

The first request that names an adapter loads it; later requests share it.

1. A cached adapter is used at once.
2. Any other adapter is loaded once for all waiting requests, as soon as its size fits the budget.
   To make room the cache evicts unused adapters, least recently used first.
3. If adapters in use leave too little room, the request waits. Later requests queue behind it,
   after `FAIR_AFTER_S` even those for cached adapters, so that no request starves.
4. An adapter larger than the whole budget is refused.
5. An adapter unused for the model's keep_alive is evicted; an outdated revision is evicted as soon
   as no request uses it.

The engine says what the budget is: bytes that adapters share with the KV cache in the builtin
engine, a number of adapters in vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from shared.contracts.engine import LoadedAdapter
from shared.contracts.models import ModelCard
from shared.errors import InsufficientMemory, ShuttingDown
from shared.tasks import end

log = logging.getLogger(__name__)
FAIR_AFTER_S = 2.0
T = TypeVar("T")


class AdapterSource(Protocol[T]):
    """Loads and unloads adapters."""

    async def load(self, card: ModelCard, number: int) -> T:
        """Load an adapter.

        Args:
            card: The adapter.
            number: Unique within this engine.

        Raises:
            ThawError: It cannot be loaded; no memory is left in use.
        """

    async def drop(self, adapter: T, number: int) -> None:
        """Unload an adapter that no request uses, and return when its memory is free.

        The caller keeps no reference.
        """


class AdapterRoom(Protocol):
    """The room for adapters, in a unit of its own."""

    @property
    def budget(self) -> int: ...

    def size_of(self, card: ModelCard) -> int: ...

    def on_used(self, used: int) -> None:
        """Notify the engine of the part of the budget that is in use now."""

    def refuse(self, card: ModelCard) -> InsufficientMemory:
        """Return the error for an adapter that is larger than the budget."""


@dataclass(eq=False)
class _Entry(Generic[T]):
    card: ModelCard
    number: int
    adapter: T | None = None
    loading: asyncio.Task[None] | None = None
    users: int = 0
    used_at: float = 0.0
    is_registered: bool = True
    expiry: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        return self.users == 0 and self.adapter is not None


class AdapterCache(Generic[T]):
    """Adapters by revision. Runs on the event loop.

    Args:
        source: Loads and unloads adapters.
        room: The budget of adapters.
        keep_s: Seconds that an unused adapter stays; negative: until its memory is needed.
        changed: Called when the loaded adapters or their users change.
    """

    def __init__(self, source: AdapterSource[T], room: AdapterRoom, keep_s: float, changed: Callable[[], None]) -> None:
        self._source = source
        self._room = room
        self._keep_s = keep_s
        self._changed = changed
        self._entries: dict[str, _Entry[T]] = {}
        self._used = 0
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._waited_since: float | None = None
        self._freed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def list_loaded(self) -> tuple[LoadedAdapter, ...]:
        there = (e for e in self._entries.values() if e.adapter is not None)
        return tuple(LoadedAdapter(name=e.card.name, nbytes=e.card.info.weights_bytes, active=e.users) for e in there)

    async def acquire(self, card: ModelCard) -> T:
        """Return the loaded adapter. The caller gives it back with `release`.

        Raises:
            InsufficientMemory: The adapter is larger than the budget.
            ShuttingDown: The cache is closed.
            ThawError: The adapter cannot be loaded.
        """
        if self._is_closed:
            raise ShuttingDown("The engine is ending")
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

    async def load_ahead(self, card: ModelCard) -> None:
        """Load an adapter before its request arrives, which gets the error if there is one."""
        try:
            await self.acquire(card)
        except Exception as e:  # a task boundary: the request that needs the adapter receives the error
            log.info("failed to load an adapter ahead of its request", extra={"adapter": card.name, "reason": str(e)})
        else:
            self.release(card.info.revision)

    def release(self, revision: str) -> None:
        """Give back an adapter after a request has ended."""
        self._unuse(self._entries[revision])

    def drop(self, name: str, keep: str = "") -> None:
        """Evict the adapter's revisions except `keep`, as soon as no request uses them."""
        for entry in [e for e in self._entries.values() if e.card.name == name and e.card.info.revision != keep]:
            entry.is_registered = False
            self._expire(entry)

    async def close(self) -> None:
        """End all loads and timers: nothing refers to the adapters afterwards, but their users.

        No adapter is unloaded: the memory of the engine is about to be freed.
        """
        self._is_closed = True
        for entry in self._entries.values():
            if entry.expiry is not None:
                entry.expiry.cancel()
        await end(*self._tasks)

    def _must_queue(self) -> bool:
        since = self._waited_since
        return since is not None and asyncio.get_running_loop().time() - since > FAIR_AFTER_S

    def _use(self, entry: _Entry[T]) -> None:
        entry.users += 1
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None
        self._changed()

    def _unuse(self, entry: _Entry[T]) -> None:
        loop = asyncio.get_running_loop()
        entry.users -= 1
        entry.used_at = loop.time()
        if entry.users == 0:
            self._freed.set()
            if not entry.is_registered:
                self._expire(entry)
            elif self._keep_s >= 0 and self._entries.get(entry.card.info.revision) is entry and not self._is_closed:  # 5
                entry.expiry = loop.call_later(self._keep_s, self._expire, entry)
        self._changed()

    def _expire(self, entry: _Entry[T]) -> None:
        if entry.idle and not self._is_closed:
            self._spawn(self._evict(entry), f"drop {entry.card.name}")

    async def _start_load(self, card: ModelCard) -> _Entry[T]:
        """Make room and start loading. One caller at a time."""
        self.drop(card.name, keep=card.info.revision)
        size = self._room.size_of(card)
        if size > self._room.budget:  # 4
            raise self._room.refuse(card)
        self._waited_since = asyncio.get_running_loop().time()
        try:
            while self._used + size > self._room.budget:
                self._freed.clear()
                idle = min((e for e in self._entries.values() if e.idle), key=lambda e: e.used_at, default=None)
                if idle is not None:  # 2; to its end, also if the request ends meanwhile
                    await asyncio.shield(self._spawn(self._evict(idle), f"drop {idle.card.name}"))
                else:  # 3
                    await self._freed.wait()
        finally:
            self._waited_since = None
        self._account(size)
        entry: _Entry[T] = _Entry(card, next(self._numbers))
        entry.loading = self._spawn(self._load(entry), f"load {card.name}")
        self._entries[card.info.revision] = entry
        return entry

    async def _load(self, entry: _Entry[T]) -> None:
        card = entry.card
        try:
            entry.adapter = await self._source.load(card, entry.number)
        except BaseException:
            del self._entries[card.info.revision]
            self._account(-self._room.size_of(card))
            raise
        if entry.users == 0:  # the request was cancelled while the adapter was loading
            self._use(entry)
            self._unuse(entry)
        log.info("loaded an adapter", extra={"adapter": card.name, "bytes": card.info.weights_bytes})
        self._changed()

    async def _evict(self, entry: _Entry[T]) -> None:
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
        try:
            await dropping
        except Exception:  # the next adapter needs the room, and its request is not to blame
            log.exception("failed to unload an adapter", extra={"adapter": entry.card.name})
        finally:
            self._account(-self._room.size_of(entry.card))
            self._changed()

    def _account(self, size: int) -> None:
        """Add `size` (negative: subtract) to what adapters use of the budget."""
        self._used += size
        self._freed.set()
        self._room.on_used(self._used)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("failed to load an adapter", extra={"error": str(error)})
