"""The loader's loop loads weights to GPUs.

The driver copies in host memory. The tests cover holders, sharing, release, and failures.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.loader import AttachWeights, PrepareWeights, WeightsAttached
from shared.contracts.models import ModelCard
from shared.contracts.segment import CudaIpcHandle
from shared.errors import DeviceFailed, InsufficientMemory, NotFound
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.devices.gpu_bench import GpuBench
from weights.pool.chunks import CHUNK_BYTES


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[GpuBench]:
    bench = GpuBench(tmp_path / "home")
    await bench.engines_may_map()
    yield bench
    await bench.loader.stop()
    assert bench.driver.memory == {}
    assert bench.driver.pinned == {}
    assert bench.driver.streams == []
    bench.pool.close(unlink=True)


@pytest.fixture
async def card(bench: GpuBench, tmp_path: Path) -> ModelCard:
    """Build a card of a model with more than one chunk, in two files."""
    write_checkpoint(tmp_path / "m", tensors(1.5 * CHUNK_BYTES / 1e6), shards=2)
    return await bench.card(tmp_path / "m")


async def test_chunks_are_copied_while_read_and_freed_with_the_last_holder(bench: GpuBench, card: ModelCard) -> None:
    await bench.loader.handle(PrepareWeights(token=1 << 32, instance_id="a", card=card, device="cuda:0"))
    found = await bench.on("cuda:0", "a", card)
    assert isinstance(found.handle, CudaIpcHandle)
    assert (found.handle.device, found.boot_id) == ("cuda:0", "boot")
    assert bench.on_device(found) == bench.in_host_memory(found)
    shared = await bench.on("cuda:0", "b", card)
    assert shared.handle == found.handle
    [segment] = bench.status().segments
    assert segment.on_devices == {"cuda:0": found.total_bytes}
    [bus] = [x for x in bench.status().links if x.link.startswith("bus:")]
    assert (bus.link, bus.queued_bytes, bus.loads) == ("bus:cuda:0", 0, 0)
    assert bus.bytes_per_second
    assert (await bench.release("a")).device_bytes == 0
    assert len(bench.driver.memory) == 1
    left = await bench.release("b")
    assert (left.device_bytes, left.freed_bytes) == (found.total_bytes, found.total_bytes)
    assert (bench.driver.memory, bench.driver.pinned) == ({}, {})


async def test_whole_chunks_are_copied_from_pinned_memory(bench: GpuBench, card: ModelCard) -> None:
    found = await bench.on("cuda:0", "a", card)
    assert sorted(bench.driver.pinned.values()) == [CHUNK_BYTES] * (found.total_bytes // CHUNK_BYTES)
    again = await bench.on("cuda:1", "b", card)
    assert bench.on_device(again) == bench.on_device(found)


def _two_busy(driver: FakeDriver) -> None:
    with driver.issued:
        assert driver.issued.wait_for(lambda: sum(s.work.qsize() > 0 for s in driver.streams) >= 2, 60)


async def test_devices_copy_in_parallel_to_their_own_memory(bench: GpuBench, card: ModelCard) -> None:
    bench.driver.gate.clear()
    both = [asyncio.create_task(bench.on(f"cuda:{i}", f"i{i}", card)) for i in range(2)]
    host_only = await bench.attach("host", card)
    assert host_only.handle is None
    await asyncio.to_thread(_two_busy, bench.driver)
    assert sorted(x.link for x in bench.status().links if x.loads) == ["bus:cuda:0", "bus:cuda:1"]
    assert not any(task.done() for task in both)
    bench.driver.gate.set()
    first, second = await asyncio.gather(*both)
    assert bench.on_device(first) == bench.on_device(second) == bench.in_host_memory(host_only)
    assert (await bench.release("i0")).device_bytes == first.total_bytes
    assert list(bench.status().segments[0].on_devices) == ["cuda:1"]


async def test_the_index_is_reported_before_the_bytes_arrive(bench: GpuBench, card: ModelCard) -> None:
    bench.driver.gate.clear()
    index = await bench.loader.handle(AttachWeights(instance_id="a", card=card, until="index", device="cuda:0"))
    assert isinstance(index, WeightsAttached)
    whole = asyncio.create_task(bench.on("cuda:0", "a", card))
    await asyncio.to_thread(bench.driver.await_copies, 1)
    assert not whole.done()
    bench.driver.gate.set()
    assert bench.on_device(await whole) == bench.in_host_memory(index)


async def test_release_waits_for_running_copies(bench: GpuBench, card: ModelCard) -> None:
    bench.driver.gate.clear()
    whole = asyncio.create_task(bench.on("cuda:0", "a", card))
    await asyncio.to_thread(bench.driver.await_copies, 1)
    released = asyncio.create_task(bench.release("a"))
    with pytest.raises(Exception, match="released"):
        await whole
    assert not released.done()
    bench.driver.gate.set()
    await released
    assert bench.driver.memory == {}


async def test_without_device_memory_the_engine_copies_itself(
    bench: GpuBench, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> int:
        raise InsufficientMemory("cudaMalloc: out of memory", should_retry=True)

    monkeypatch.setattr(bench.driver, "allocate", none)
    found = await bench.on("cuda:0", "a", card)
    assert found.handle is None
    assert bench.status().segments[0].on_devices == {}
    monkeypatch.undo()
    await bench.release("a")
    assert (await bench.on("cuda:0", "b", card)).handle is not None


@pytest.mark.parametrize("fault", ["fail_copy", "fail_event"])
async def test_failed_device_keeps_no_memory(bench: GpuBench, card: ModelCard, fault: str) -> None:
    setattr(bench.driver, fault, True)
    found = await bench.on("cuda:0", "a", card)
    assert found.handle is None
    assert bench.driver.memory == {}
    assert len(bench.in_host_memory(found)) == found.total_bytes


@pytest.mark.parametrize("other_stays", [True, False])
async def test_unfreed_memory_of_a_broken_device_blocks_no_waiter(
    bench: GpuBench, card: ModelCard, monkeypatch: pytest.MonkeyPatch, other_stays: bool
) -> None:
    await bench.on("cuda:0", "a", card)
    if other_stays:
        await bench.attach("host", card)

    def broken(_: int) -> None:
        raise DeviceFailed("cudaFree: an illegal memory access was encountered (cudaErrorIllegalAddress)")

    with monkeypatch.context() as patched:
        patched.setattr(bench.driver, "free", broken)
        patched.setattr(bench.driver, "unregister", lambda address: broken(bench.driver.pinned.pop(address)))
        async with asyncio.timeout(60):
            assert (await bench.release("a")).device_bytes == 0, "no byte is reported free that is not"
    bench.driver.memory.clear()
    if other_stays:
        await bench.release("host")
    assert bench.status().segments == ()


async def test_a_load_to_a_device_without_units_has_no_arrivals_to_follow(bench: GpuBench, card: ModelCard) -> None:
    found = await bench.on("cuda:0", "a", card)
    with pytest.raises(NotFound, match="cuda:0 has no units"):
        await anext(aiter(bench.loader.follow("a", found.weights_id)))
    assert bench.status().memory == ()


async def test_unknown_device_gets_no_handle(bench: GpuBench, card: ModelCard) -> None:
    assert (await bench.on("cuda:7", "a", card)).handle is None


async def test_engines_that_must_not_map_get_no_handle(bench: GpuBench, card: ModelCard) -> None:
    await bench.engines_may_map(yes=False)
    assert (await bench.on("cuda:0", "a", card)).handle is None
    assert bench.devices.opened == ()


async def test_memory_that_cannot_be_pinned_is_copied_anyway(
    bench: GpuBench, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: int) -> None:
        raise InsufficientMemory("cudaHostRegister: out of memory")

    monkeypatch.setattr(bench.driver, "register", none)
    found = await bench.on("cuda:0", "a", card)
    assert bench.on_device(found) == bench.in_host_memory(found)


async def test_cached_weights_are_copied_to_a_device_again(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path / "home", budget=4 * CHUNK_BYTES)
    await bench.engines_may_map()
    write_checkpoint(tmp_path / "m", tensors(1.2 * CHUNK_BYTES / 1e6))
    card = await bench.card(tmp_path / "m")
    first = await bench.on("cuda:0", "a", card)
    released = await bench.release("a")
    assert (released.cached_bytes, released.device_bytes) == (first.total_bytes, first.total_bytes)
    assert bench.driver.memory == {}
    again = await bench.on("cuda:0", "b", card)
    assert bench.on_device(again) == bench.in_host_memory(first)
    [record], mapped = bench.records.recover(bench.pool)
    after = bench.another("next")
    after.adopt([record], mapped)  # holders of an earlier loader have nothing of this one's on a device
    assert [s.on_devices for s in bench.status(after).segments] == [{}]
    await after.stop()
    await bench.loader.stop()
    assert (bench.driver.memory, bench.driver.pinned) == ({}, {})
    bench.pool.close(unlink=True)


def test_loader_does_not_import_cuda_by_itself() -> None:
    code = "import sys, services.loader.app; print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'torch', 'pynvml')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
