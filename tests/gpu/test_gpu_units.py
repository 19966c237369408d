"""Weights as units on a real GPU: `python -m pytest tests/gpu`.

The store behaves as on the stand-in, and other processes map its units through torch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.engine.model.arriving import Follower
from services.engine.model.gpu_units import ArrivingUnits
from services.loader.local_socket import LocalReaders, listening
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.segment import PagesLayout
from shared.errors import DeviceMissing, InsufficientMemory
from tests.unit.loader.devices.behaviour import DeviceBehaviour, Host
from tests.unit.loader.devices.gpu_bench import GROUP
from tests.unit.loader.store.units_bench import REUSE_PAGES, Engine, UnitsBench, model
from weights.devices.cuda_runtime import CudaRuntime, load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.opening import Devices
from weights.devices.pinning import Pins
from weights.devices.port import Arena, Device, Place
from weights.pool import shm
from weights.store.arena import PagedArena
from weights.store.gpu_device import GpuDevice, gpu_devices
from weights.store.residency import KnownUnits
from weights.store.units import PAGE_BYTES

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> CudaRuntime:
    try:
        cuda = load_cuda()
    except DeviceMissing as e:
        pytest.skip(e.message)
    if not load_virtual_memory().is_supported(0):
        pytest.skip("cuda:0 has no allocations that can be exported by file descriptor")
    return cuda


class TestRealUnits(DeviceBehaviour):
    RELEASED = 0

    @pytest.fixture
    def device(self, cuda: CudaRuntime) -> Iterator[Device]:
        self.gpu = GpuDevice(cuda, load_virtual_memory(), cuda.facts(0), GROUP, Pins(cuda), reuse_bytes=GROUP)
        yield self.gpu
        self.gpu.close()

    def read(self, arena: Arena, nbytes: int) -> bytes:
        assert isinstance(arena, PagedArena)
        [key] = arena.keys
        return b"".join(map(bytes, self.gpu.memory.views(self.gpu.store().units[key], 0, nbytes)))

    def test_a_reader_may_wait_for_the_first_bytes_only(self, arena: Arena, host: Host) -> None:
        """Skip: a segment of unknown contents is one unit, which is there as a whole."""
        pytest.skip("a segment of unknown contents is one unit")

    def test_an_allocation_that_another_program_prevents_is_an_error(self, device: Device, cuda: CudaRuntime) -> None:
        cuda.use(0)
        taken = cuda.allocate(cuda.free_bytes() - (64 << 20))
        try:
            arena, big = device.allocate(Place("big", 128 << 20, "thaw-test")), Host(128 << 20)
            arena.fill(0, big.address, 128 << 20)
            with pytest.raises(InsufficientMemory, match="cuMemCreate"):
                arena.wait(128 << 20)
        finally:
            cuda.free(taken)


class RealBench(UnitsBench):
    def open_devices(self) -> Devices:
        return Devices(load_cuda, lambda *_: GROUP, gpu_devices(REUSE_PAGES * PAGE_BYTES, KnownUnits(), verify=True))


@pytest.fixture
async def bench(cuda: CudaRuntime, tmp_path: Path) -> AsyncIterator[RealBench]:
    pytest.importorskip("torch")
    bench = RealBench(tmp_path / "home")
    await bench.engines_may_map()
    yield bench
    await bench.loader.stop()
    bench.pool.close(unlink=True)


async def test_processes_map_units_which_outlive_their_instance(bench: RealBench, tmp_path: Path) -> None:
    card = await model(bench, tmp_path / "m", 1, 2, 3, 4, 5)
    path = tmp_path / "loader.sock"
    async with listening(path, LocalReaders(bench.loader, shm.SHM, "socket")):
        first: list[str] = []
        for instance in ("a", "b"):
            found = await bench.load(instance, card)
            engine = Engine(path, instance, found, "real")
            first = first or bench.units(found)  # the second load reads no more than the GPU lacks
            assert await engine.seen() == first
            await engine.kill()
            await bench.release(instance)
            assert bench.used_pages() == (0, REUSE_PAGES)
    assert bench.device.pages().copied_bytes == (5 + 5 - REUSE_PAGES) * PAGE_BYTES


async def test_units_are_mapped_at_addresses_that_torch_knows_before(bench: RealBench, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch here has no CUDA")
    card, path = await model(bench, tmp_path / "m", 1, 2, 3, 4, 5), tmp_path / "loader.sock"
    loop = asyncio.get_running_loop()
    laid_out: asyncio.Future[PagesLayout | None] = loop.create_future()

    def report(layout: PagesLayout | None) -> None:
        loop.call_soon_threadsafe(laid_out.set_result, layout)

    async with listening(path, LocalReaders(bench.loader, shm.SHM, "socket")), asyncio.timeout(120):
        index = await bench.loader.handle(AttachWeights(instance_id="a", card=card, until="index", device="cuda:0"))
        assert isinstance(index, WeightsAttached)
        follower = await asyncio.to_thread(Follower, path, "a", index.weights_id, report)
        layout = await laid_out
        assert layout is not None
        found = await bench.load("a", card)
        await asyncio.to_thread(follower.arriving.wait, [(u.offset, u.offset + u.nbytes) for u in layout.units])
        await asyncio.to_thread(follower.end)
    units = follower.pages
    assert isinstance(units, ArrivingUnits)
    mapped = [units.memory[u.start : u.start + u.nbytes].cpu().numpy().tobytes() for u in layout.units]
    assert [hashlib.sha256(unit).hexdigest() for unit in mapped] == bench.units(found)
