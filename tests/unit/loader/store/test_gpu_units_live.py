"""The loader keeps weights as units on a GPU, and engines' processes map them over its socket."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.engine.model import gpu_units
from services.engine.model.arriving import Follower
from services.loader.local_socket import LocalReaders, listening
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.loader_socket import SocketMap
from shared.contracts.segment import GpuUnitsHandle, PagesLayout
from shared.errors import EngineFailed, NotFound
from tests.support import mapped_gpu_units
from tests.unit.loader.store.units_bench import DEVICE, REUSE_PAGES, Engine, UnitsBench, model
from weights.pool import shm
from weights.store.units import PAGE_BYTES


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[UnitsBench]:
    bench = UnitsBench(tmp_path / "home")
    await bench.engines_may_map()
    yield bench
    await bench.loader.stop()
    vm = bench.virtual_memory
    assert (vm.handles, vm.mappings, vm.reservations) == ({}, {}, {})
    assert (bench.driver.pinned, bench.driver.streams) == ({}, [])
    bench.pool.close(unlink=True)


@pytest.fixture
async def path(bench: UnitsBench, tmp_path: Path) -> AsyncIterator[Path]:
    async with listening(tmp_path / "loader.sock", LocalReaders(bench.loader, shm.SHM, "socket")):
        yield tmp_path / "loader.sock"


async def test_engines_map_the_loaded_bytes_and_share_them(bench: UnitsBench, path: Path, tmp_path: Path) -> None:
    base, tuned = await model(bench, tmp_path / "base", 1, 2, 3, 4, 5), await model(bench, tmp_path / "tuned", 1, 2, 3, 4, 9)
    first, second = await bench.load("a", base), await bench.load("b", tuned)
    assert bench.used_pages() == (6, 0), "both together hold 1.2 of one"
    engines = [Engine(path, "a", first), Engine(path, "b", second)]
    for engine, found in zip(engines, (first, second), strict=True):
        assert await engine.seen() == bench.units(found)
    assert bench.allocated_pages() == 6, "engines map the loader's memory"
    assert (bench.device.pages().copied_bytes, bench.device.pages().reused_bytes) == (6 * PAGE_BYTES, 4 * PAGE_BYTES)
    for engine in engines:
        await engine.kill()


async def test_units_outlive_their_instance_up_to_the_limit(bench: UnitsBench, path: Path, tmp_path: Path) -> None:
    card = await model(bench, tmp_path / "m", 1, 2, 3, 4, 5)
    found = await bench.load("a", card)
    engine, first = Engine(path, "a", found), bench.units(found)
    assert await engine.seen() == first
    await engine.kill()
    assert (await bench.release("a")).device_bytes == 0, "nothing for the nodeagent to wait for"
    assert bench.used_pages() == (0, REUSE_PAGES)
    assert bench.allocated_pages() == REUSE_PAGES
    again = await bench.load("b", card)
    assert bench.device.pages().copied_bytes == (5 + 5 - REUSE_PAGES) * PAGE_BYTES
    engine = Engine(path, "b", again)
    assert await engine.seen() == first
    await engine.kill()


async def test_units_that_a_process_maps_are_not_given_up(bench: UnitsBench, path: Path, tmp_path: Path) -> None:
    card, other = await model(bench, tmp_path / "m", 1, 2, 3, 4, 5), await model(bench, tmp_path / "other", 7)
    found = await bench.load("a", card)
    engine = Engine(path, "a", found)
    assert await engine.seen() == bench.units(found)
    await bench.release("a")
    assert bench.used_pages() == (0, 5), "the limit waits for the process"
    assert bench.device.audit_mapped().held_back_pages == 5
    await engine.kill()
    assert bench.device.audit_mapped().held_back_pages == 0
    await bench.load("b", other)
    await bench.release("b")
    assert bench.used_pages() == (0, REUSE_PAGES)
    assert bench.allocated_pages() == REUSE_PAGES


async def test_an_engine_keeps_what_it_maps_when_the_loader_ends(bench: UnitsBench, path: Path, tmp_path: Path) -> None:
    found = await bench.load("a", await model(bench, tmp_path / "m", 1, 2, 3))
    engine = Engine(path, "a", found)
    assert await engine.seen() == bench.units(found)
    await bench.loader.stop()
    assert bench.allocated_pages() == 3, "never given to others while it is mapped"
    await engine.kill()
    assert bench.allocated_pages() == 0


async def test_only_a_holder_of_weights_gets_descriptors(
    bench: UnitsBench, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_units, "gpu_memory", mapped_gpu_units.gpu_memory)
    found = await bench.load("a", await model(bench, tmp_path / "m", 1))
    assert isinstance(found.handle, GpuUnitsHandle)
    with pytest.raises(NotFound, match="Attach first"):
        await asyncio.to_thread(gpu_units.open_units, found.handle, path, "b", found.weights_id)
    assert bench.device.audit_mapped().processes == ()


async def test_engine_that_disconnects_leaves_no_descriptor(
    bench: UnitsBench, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_units, "gpu_memory", mapped_gpu_units.gpu_memory)
    monkeypatch.setattr(gpu_units, "see_as_bytes", mapped_gpu_units.see_as_bytes)
    found = await bench.load("a", await model(bench, tmp_path / "m", 1, 2))
    assert isinstance(found.handle, GpuUnitsHandle)
    # From now on the loader has a pidfd of this process.
    await asyncio.to_thread(gpu_units.open_units, found.handle, path, "a", found.weights_id)
    assert bench.device.audit_mapped().processes == (os.getpid(),)
    before = open_descriptors()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.connect(str(path))
            connected.sendall(SocketMap(instance_id="a", weights_id=found.weights_id).model_dump_json().encode() + b"\n")
    async with asyncio.timeout(60):
        while open_descriptors() > before:  # noqa: ASYNC110  # threads notify no event loop
            await asyncio.sleep(0.01)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_an_engine_maps_units_while_others_are_copied(
    bench: UnitsBench, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_units, "gpu_memory", mapped_gpu_units.gpu_memory)
    monkeypatch.setattr(gpu_units, "see_as_bytes", mapped_gpu_units.see_as_bytes)
    card = await model(bench, tmp_path / "m", 1, 2, 3, 4, 5)
    bench.driver.gate.clear()
    index = await bench.loader.handle(AttachWeights(instance_id="a", card=card, until="index", device=DEVICE))
    assert isinstance(index, WeightsAttached)
    laid_out: asyncio.Future[PagesLayout | None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def report(layout: PagesLayout | None) -> None:
        loop.call_soon_threadsafe(laid_out.set_result, layout)

    follower = await asyncio.to_thread(Follower, path, "a", index.weights_id, report)
    async with asyncio.timeout(60):
        layout = await laid_out
        assert layout is not None
        whole = asyncio.create_task(bench.load("a", card))
        await asyncio.to_thread(bench.driver.await_copies, 1)
        assert not whole.done()
        bench.driver.gate.set()
        spans = [(u.offset, u.offset + u.nbytes) for u in layout.units]
        await asyncio.to_thread(follower.arriving.wait, spans)
        found = await whole
    units = follower.pages
    assert isinstance(units, gpu_units.ArrivingUnits)
    assert isinstance(found.handle, GpuUnitsHandle)
    await asyncio.to_thread(follower.end)
    units.map_all(found.handle)
    mapped = [units.memory[u.start : u.start + u.nbytes].numpy().tobytes() for u in layout.units]
    assert [hashlib.sha256(unit).hexdigest() for unit in mapped] == bench.units(found)
    with pytest.raises(EngineFailed, match="have changed"):
        units.map_all(found.handle.model_copy(update={"units": found.handle.units[1:]}))
    with pytest.raises(EngineFailed, match="not expected"):
        units.map([0], [os.open(os.devnull, os.O_RDONLY)])


async def test_memory_of_others_does_not_count_as_the_devices(bench: UnitsBench, tmp_path: Path) -> None:
    await bench.load("a", await model(bench, tmp_path / "m", 1, 2))
    [before] = bench.status().memory
    bench.driver.use(0)
    taken = bench.virtual_memory.create(0, 3 * PAGE_BYTES)  # as an engine does for its KV cache
    await bench.loader.audit()
    [after] = bench.status().memory
    assert before.free_bytes - after.free_bytes == before.total_bytes - after.total_bytes == 3 * PAGE_BYTES
    assert after.free_bytes + after.mapped_bytes + after.reusable_bytes == after.total_bytes
    assert (after.mapped_bytes, after.is_lending, after.violations) == (2 * PAGE_BYTES, False, ())
    bench.virtual_memory.release(taken)
