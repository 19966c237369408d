"""The engine's cache of LoRA adapters.

It loads each adapter once, evicts the least recently used, starves no request, and shares memory
with the KV cache.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from services.engine.domain.step_planning import BLOCK_TOKENS, LoraBudget, lora_budget
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.lora.room import LoraRoom
from shared.contracts.models import ModelCard
from shared.engines import adapter_cache
from shared.engines.adapter_cache import AdapterCache
from shared.errors import CheckpointInvalid, InsufficientMemory, ShuttingDown
from tests.unit.engine.lora_cards import card


class FakeSource:
    """A source of LoRA adapters.

    Attributes:
        events: Operations in order.
        hold: Delays loads until it is set; None: they end at once.
        hold_drop: Delays drops in the same way.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.dropped = asyncio.Event()
        self.blocks: list[int] = []
        self.hold: asyncio.Event | None = None
        self.hold_drop: asyncio.Event | None = None
        self.error: Exception | None = None
        self.drop_error: Exception | None = None

    async def load(self, card: ModelCard, number: int) -> LoraAdapter:
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        self.events.append(f"load {card.name}")
        return LoraAdapter(card.name, {})

    async def drop(self, adapter: LoraAdapter, number: int) -> None:
        self.events.append(f"drop {adapter.name}")
        if self.hold_drop is not None:
            await self.hold_drop.wait()
        if self.drop_error is not None:
            raise self.drop_error
        self.dropped.set()


def made(source: FakeSource, budget: int = 100, keep_s: float = -1) -> AdapterCache[LoraAdapter]:
    memory = LoraBudget(granted=1000, block_bytes=10, budget=budget, reserved=False)
    return AdapterCache(source, LoraRoom(memory, source.blocks.append), keep_s, lambda: None)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_concurrent_requests_share_one_adapter_load() -> None:
    source = FakeSource()
    source.hold = asyncio.Event()
    store = made(source)
    asking = [asyncio.create_task(store.acquire(card("a"))) for _ in range(3)]
    await settle()
    assert store.list_loaded() == ()
    source.hold.set()
    first, *others = await asyncio.gather(*asking)
    assert others == [first, first]
    assert source.events == ["load a"]
    assert [(a.name, a.nbytes, a.active) for a in store.list_loaded()] == [("a", 40, 3)]


async def test_least_recently_used_adapter_is_evicted_and_kv_blocks_follow() -> None:
    source = FakeSource()
    store = made(source)
    for name in "ab":
        await store.acquire(card(name))
    store.release("b")
    store.release("a")
    await store.acquire(card("c"))
    assert source.events == ["load a", "load b", "drop b", "load c"]
    assert source.blocks == [96, 92, 96, 92]


async def test_eviction_ends_although_its_request_is_cancelled() -> None:
    """Else the room of the evicted adapter would count as used for ever."""
    source = FakeSource()
    store = made(source, budget=40)
    await store.acquire(card("a"))
    store.release("a")
    source.hold_drop = asyncio.Event()
    asking = asyncio.create_task(store.acquire(card("b")))
    await settle()
    asking.cancel()
    await settle()
    source.hold_drop.set()
    async with asyncio.timeout(60):
        await store.acquire(card("c"))
    assert source.events == ["load a", "drop a", "load c"]


async def test_adapter_waits_for_adapters_in_use_and_is_served_in_turn() -> None:
    source = FakeSource()
    store = made(source)
    await store.acquire(card("a", 90))
    waiting = [asyncio.create_task(store.acquire(card(name, 90))) for name in "bc"]
    await settle()
    assert source.events == ["load a"]
    store.release("a")
    await waiting[0]
    assert not waiting[1].done()
    store.release("b")
    await waiting[1]
    assert source.events == ["load a", "drop a", "load b", "drop b", "load c"]


async def test_no_request_overtakes_one_that_has_waited_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_cache, "FAIR_AFTER_S", -1.0)
    store = made(FakeSource())
    await store.acquire(card("a", 90))
    waiting = asyncio.create_task(store.acquire(card("b", 90)))
    await settle()
    late = asyncio.create_task(store.acquire(card("a", 90)))
    await settle()
    assert not late.done()
    store.release("a")
    await waiting
    store.release("b")
    await late


async def test_adapter_over_the_budget_is_refused_with_a_remedy() -> None:
    with pytest.raises(InsufficientMemory, match="adapter_cache_bytes of base to 101 or more"):
        await made(FakeSource()).acquire(card("a", 101))


async def test_failed_adapter_load_frees_its_memory() -> None:
    source = FakeSource()
    source.error = CheckpointInvalid("damaged")
    store = made(source)
    with pytest.raises(CheckpointInvalid):
        await store.acquire(card("a", 90))
    source.error = None
    await store.acquire(card("b", 90))
    assert source.blocks == [91, 100, 91]


async def test_failed_eviction_frees_the_room_of_its_adapter() -> None:
    source = FakeSource()
    store = made(source, budget=40)
    await store.acquire(card("a"))
    store.release("a")
    source.drop_error = RuntimeError("of the engine")
    async with asyncio.timeout(10):
        await store.acquire(card("b"))
    assert source.events == ["load a", "drop a", "load b"]
    assert source.blocks == [96, 100, 96]
    assert [a.name for a in store.list_loaded()] == ["b"]


async def test_cancelled_waiter_does_not_cancel_a_shared_load() -> None:
    source = FakeSource()
    source.hold = asyncio.Event()
    store = made(source, keep_s=0)
    gone, stays = (asyncio.create_task(store.acquire(card("a"))) for _ in range(2))
    await settle()
    gone.cancel()
    await settle()
    source.hold.set()
    await stays
    assert store.list_loaded()[0].active == 1


async def test_an_adapter_without_waiting_requests_is_evicted_in_time() -> None:
    source = FakeSource()
    source.hold = asyncio.Event()
    store = made(source, keep_s=0)
    gone = asyncio.create_task(store.acquire(card("a")))
    await settle()
    gone.cancel()
    await settle()
    source.hold.set()
    async with asyncio.timeout(60):
        await source.dropped.wait()
    assert source.events == ["load a", "drop a"]
    assert store.list_loaded() == ()


async def test_old_revision_is_dropped_once_unused() -> None:
    source = FakeSource()
    store = made(source)
    await store.acquire(card("a", 10, "r1"))
    await store.acquire(card("a", 10, "r2"))
    await settle()
    assert len(store.list_loaded()) == 2
    store.release("r1")
    await settle()
    assert source.events == ["load a", "load a", "drop a"]
    store.drop("a")
    store.drop("nobody")
    store.release("r2")
    await settle()
    assert store.list_loaded() == ()


async def test_nothing_keeps_a_closed_cache_in_memory() -> None:
    """Its engine may be one of several in a process, which unmaps its weights."""
    store = made(FakeSource(), keep_s=300.0)
    for name in "ab":
        await store.acquire(card(name))
    store.release("a")
    await store.close()
    store.release("b")
    with pytest.raises(ShuttingDown):
        await store.acquire(card("c"))
    kept = weakref.ref(store)
    del store
    gc.collect()
    assert kept() is None


async def test_loads_of_a_closed_cache_end() -> None:
    source = FakeSource()
    source.hold = asyncio.Event()
    store = made(source, keep_s=300.0)
    loading = asyncio.create_task(store.load_ahead(card("a")))
    await settle()
    loading.cancel()
    await store.close()
    source.hold.set()
    await settle()
    assert source.events == []
    assert store.list_loaded() == ()


def test_adapter_budget_borrows_unreserved_kv_memory() -> None:
    room = lora_budget(granted=100, block_bytes=10, reserved=0, longest=3 * BLOCK_TOKENS)
    assert (room.budget, room.kv_blocks(0), room.kv_blocks(70)) == (70, 10, 3)
    kept = lora_budget(granted=100, block_bytes=10, reserved=40, longest=3 * BLOCK_TOKENS)
    assert (kept.budget, kept.kv_blocks(0), kept.kv_blocks(40)) == (40, 6, 6)
    assert lora_budget(granted=10, block_bytes=10, reserved=0, longest=3 * BLOCK_TOKENS).budget == 0
