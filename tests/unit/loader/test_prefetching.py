"""Prefetches in progress: their tiers, outcomes, and the way without memory."""

from __future__ import annotations

import asyncio
from typing import Literal

from services.loader.prefetching import OUTCOMES_KEPT, RATE_WINDOW_S, Arrived, Prefetching, TransferRate
from shared.contracts.loader import PrefetchWeights
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import InsufficientMemory, StoreFull, ThawError
from tests.support.fake_node import model_info


class Node:
    """Loads that end when the test says so, and a disk."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.load_ends, self.write_ends = asyncio.Event(), asyncio.Event()
        self.writing, self.asking_room, self.room_found = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.room_found.set()
        self.load_error: ThawError | None = None
        self.room_error: ThawError | None = None
        self.write_error: ThawError | None = None
        self.arrived, self.now = Arrived(), 0.0
        self.prefetching = Prefetching(self.load, self, self.release, lambda weights_id: self.arrived, lambda: self.now)

    async def load(self, holder: str, card: ModelCard) -> None:
        self.calls.append(f"load {card.name}")
        await self.load_ends.wait()
        if self.load_error is not None:
            raise self.load_error

    async def check_room(self, card: ModelCard) -> None:
        self.asking_room.set()
        await self.room_found.wait()
        if self.room_error is not None:
            raise self.room_error

    async def write(self, card: ModelCard) -> None:
        self.calls.append(f"write {card.name}")
        self.writing.set()
        await self.write_ends.wait()
        if self.write_error is not None:
            raise self.write_error

    def release(self, holder: str, keep: bool) -> None:
        self.calls.append(f"release {'and keep' if keep else ''}".strip())

    def begin(self, token: int, tier: Literal["ssd", "dram"] = "ssd", name: str = "m") -> None:
        card = ModelCard(spec=ModelSpec(name=name, source=f"s3://b/{name}"), info=model_info(f"s3://b/{name}"), created=0)
        self.prefetching.begin(PrefetchWeights(token=token, card=card, tier=tier))

    def states(self) -> list[tuple[int, str]]:
        return [(s.token, s.state) for s in self.prefetching.statuses()]

    async def settle(self) -> None:
        """Let all prefetches end."""
        self.load_ends.set()
        self.write_ends.set()
        running = [t for t in asyncio.all_tasks() if t.get_name().startswith("prefetch ")]
        await asyncio.gather(*running, return_exceptions=True)


async def test_commands_join_a_prefetch_and_its_weights_stay_in_all_wanted_tiers() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "dram")
    assert node.states() == [(1, "running"), (2, "running")]
    await node.settle()
    assert node.states() == [(1, "complete"), (2, "complete")]
    assert node.calls == ["load m", "write m", "release and keep"]


async def test_weights_for_the_disk_without_room_in_memory_are_written_without_a_load() -> None:
    node = Node()
    node.load_error = InsufficientMemory("no room")
    node.begin(1, "ssd")
    await node.settle()
    assert node.states() == [(1, "complete")]
    assert node.calls == ["load m", "write m", "release"]
    node.begin(2, "dram")
    await node.settle()
    assert node.states()[-1] == (2, "failed")
    error = node.prefetching.statuses()[-1].error
    assert error is not None
    assert error.code == "insufficient_memory"


async def test_a_command_for_memory_that_joins_a_write_to_the_disk_is_loaded_afterwards() -> None:
    """Memory had no room for the first load, so the prefetch that it joins leaves nothing there."""
    node = Node()
    node.load_error = InsufficientMemory("no room")
    node.begin(1, "ssd")
    node.load_ends.set()
    await node.writing.wait()
    node.load_error = None
    node.begin(2, "dram")
    await node.settle()
    assert node.states()[0] == (1, "complete")
    await node.settle()
    assert node.states() == [(1, "complete"), (2, "complete")]
    assert node.calls == ["load m", "write m", "release", "load m", "release and keep"]


async def test_a_command_for_the_disk_needs_no_memory_although_it_joins_one_that_does() -> None:
    node = Node()
    node.load_error = InsufficientMemory("no room")
    node.begin(1, "dram")
    node.begin(2, "ssd")
    await node.settle()
    assert node.states() == [(1, "failed"), (2, "complete")]
    assert node.calls == ["load m", "write m", "release"]


async def test_a_disk_without_room_is_found_before_the_load() -> None:
    node = Node()
    node.room_error = StoreFull("full")
    node.begin(1, "ssd")
    await node.settle()
    assert node.states() == [(1, "failed")]
    assert node.calls == ["release"]


async def test_a_command_for_memory_that_joins_one_without_room_on_the_disk_is_loaded() -> None:
    node = Node()
    node.room_error, node.room_found = StoreFull("full"), asyncio.Event()
    node.begin(1, "ssd")
    await node.asking_room.wait()
    node.begin(2, "dram")
    node.room_found.set()
    await node.settle()
    assert node.states() == [(1, "failed"), (2, "complete")]
    assert node.calls == ["load m", "release and keep"]
    error = node.prefetching.statuses()[0].error
    assert error is not None
    assert error.code == "store_full"


async def test_weights_in_memory_are_complete_although_the_disk_does_not_get_them() -> None:
    node = Node()
    node.write_error = StoreFull("full")
    node.begin(1, "ssd")
    node.begin(2, "dram")
    await node.settle()
    assert node.states() == [(1, "failed"), (2, "complete")]
    assert node.calls == ["load m", "write m", "release and keep"]


async def test_prefetches_yield_to_other_weights_and_a_cancelled_one_is_forgotten() -> None:
    node = Node()
    node.begin(1)
    node.begin(2, name="k")
    node.prefetching.yield_to("rev-s3://b/k")
    assert node.states() == [(1, "preempted"), (2, "running")]
    node.prefetching.cancel("rev-s3://b/k")
    assert node.states() == [(1, "preempted")]
    node.begin(3)
    assert node.states() == [(1, "preempted"), (3, "running")]
    await node.settle()
    assert node.states() == [(1, "preempted"), (3, "complete")]
    await node.prefetching.stop()


async def test_the_latest_outcomes_are_kept() -> None:
    node = Node()
    for token in range(1, OUTCOMES_KEPT + 3):
        node.begin(token)
        await node.settle()
    assert [token for token, _ in node.states()] == list(range(3, OUTCOMES_KEPT + 3))


async def test_a_cancelled_command_leaves_those_of_other_tiers_and_models() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "dram")
    node.prefetching.cancel("rev-s3://b/m", 1)
    node.prefetching.cancel("rev-s3://b/m", 7)
    node.prefetching.cancel("unknown", 2)
    assert node.states() == [(2, "running")]
    await node.settle()
    assert node.states() == [(2, "complete")]
    assert node.calls == ["load m", "release and keep"], "nothing is written to the disk"


async def test_weights_stay_in_memory_only_for_a_command_that_is_not_cancelled() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "dram")
    node.prefetching.cancel("rev-s3://b/m", 2)
    await node.settle()
    assert node.states() == [(1, "complete")]
    assert node.calls == ["load m", "write m", "release"]


async def test_the_last_cancelled_command_ends_the_prefetch() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "dram")
    node.load_ends.set()
    await node.writing.wait()
    node.prefetching.cancel("rev-s3://b/m", 2)
    node.prefetching.cancel("rev-s3://b/m", 1)
    assert node.states() == []
    tasks = [t for t in asyncio.all_tasks() if t.get_name().startswith(("prefetch ", "write "))]
    await asyncio.wait(tasks)
    assert node.calls == ["load m", "write m", "release"]
    assert node.states() == []


async def test_a_cancelled_write_to_the_disk_leaves_the_weights_in_memory() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "dram")
    node.load_ends.set()
    await node.writing.wait()
    node.prefetching.cancel("rev-s3://b/m", 1)
    [task] = [t for t in asyncio.all_tasks() if t.get_name().startswith("prefetch ")]
    await asyncio.wait([task])
    assert node.states() == [(2, "complete")]
    assert node.calls == ["load m", "write m", "release and keep"]


async def test_a_repeated_command_replaces_the_earlier_one_of_the_tier() -> None:
    node = Node()
    node.begin(1, "ssd")
    node.begin(2, "ssd")
    assert node.states() == [(2, "running")]
    node.prefetching.cancel("rev-s3://b/m", 1)
    await node.settle()
    assert node.states() == [(2, "complete")]


async def test_statuses_have_the_progress_of_what_runs() -> None:
    node = Node()
    node.begin(1, "ssd")
    [first] = node.prefetching.statuses()
    assert (first.loaded_bytes, first.total_bytes, first.bytes_per_second) == (0, 0, None)
    node.arrived, node.now = Arrived(300, 1000), 2.0
    [status] = node.prefetching.statuses()
    assert (status.loaded_bytes, status.total_bytes, status.bytes_per_second) == (300, 1000, 150.0)
    await node.settle()
    [status] = node.prefetching.statuses()
    assert (status.state, status.bytes_per_second) == ("complete", None)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = TransferRate()
    assert rate.measure(0.0, 0) is None
    assert rate.measure(0.1, 100) is None
    assert rate.measure(1.0, 1000) == 1000.0
    for second in range(2, 30):
        rate.measure(float(second), 1000)
    assert rate.measure(30.0, 1000) == 0.0
    assert rate.measure(30.0 + RATE_WINDOW_S, 1000 + int(50 * RATE_WINDOW_S)) == 50.0
    assert rate.measure(60.0, 0) is None, "fewer bytes are another transfer"
