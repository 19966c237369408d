"""Loaders in one process with a device that keeps units: separate cpu, and the stand-in GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.loader.adapters.device_copies import Copies
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from shared.contracts.loader import AttachWeights, DeviceMemory, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.loader_socket import SocketMap
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, NodeOutline
from shared.contracts.segment import GpuUnitsHandle, PagesHandle
from shared.mapping import map_extents
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.loader_bench import Bench
from tests.unit.loader.store.gpu import Gpu, Gpus
from weights.convert.job import convert
from weights.pool import shm
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.store.generations import file_name
from weights.store.node_devices import NodeDevices
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

TENSORS = 10
PAGES = 2 * TENSORS
"""A load without known hashes has pages for all of its units until their bytes are hashed."""


class SeparateBench(Bench):
    """A loader with one device that keeps units: a separate cpu device."""

    DEVICE = "cpu:1"

    async def start(self) -> None:
        """Let engines map weights on the device."""

    def workers(self, emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        name = file_name(self.records.prefix, "cpu:1", "boot")
        if not (shm.SHM / name).exists():  # the first of two loaders of this class has no devices
            self.device = SeparateDevice("cpu:1", PAGES * PAGE_BYTES, name)
        copies = Copies(NodeDevices({"cpu:1": self.device}), self.pool, emit)
        return Runs(self.pool, self.sources, emit, Threads(2, 2), copies=copies), Reclaimer(self.pool, emit)

    async def on_device(self, instance: str, card: ModelCard) -> WeightsAttached:
        asked = AttachWeights(instance_id=instance, card=card, until="complete", device=self.DEVICE)
        found = await self.loader.handle(asked)
        assert isinstance(found, WeightsAttached)
        return found

    async def release(self, instance: str) -> None:
        released = await self.loader.handle(ReleaseWeights(instance_id=instance))
        assert isinstance(released, WeightsReleased)
        assert released.device_bytes == 0, "nothing for the nodeagent to wait for: the units stay"

    def memory(self) -> DeviceMemory:
        [found] = self.status().memory
        assert found.free_bytes + found.mapped_bytes + found.reusable_bytes + found.lent_bytes == found.total_bytes
        assert self.device.audit() == []
        return found

    def read(self, instance: str, found: WeightsAttached) -> bytes:
        """Return the units as an engine of the instance maps them."""
        assert isinstance(found.handle, PagesHandle)
        mapped = map_extents(shm.SHM / found.handle.file, found.handle.extents)
        try:
            return b"".join(mapped[u.start : u.start + u.nbytes] for u in found.handle.units)
        finally:
            mapped.close()

    async def stop(self) -> None:
        """Stop the loader, and check that it leaves nothing."""
        await self.loader.stop()
        self.pool.close(unlink=True)
        assert shm.segments(self.records.prefix) == []


class GpuSeparateBench(SeparateBench):
    """A loader with one GPU, of which all pages may be units without an instance."""

    DEVICE = "cuda:0"

    def make_gpus(self) -> Gpus:
        return Gpus(PAGES)

    def __init__(self, home: Path) -> None:
        self.gpus = self.make_gpus()
        super().__init__(home)
        self.pool.close(unlink=True)
        pin, unpin = self.gpus.devices.pin, self.gpus.devices.unpin
        self.pool = PoolMemory(self.records.pool_name, 8 * CHUNK_BYTES, on_populated=pin, on_punch=unpin)
        self.loader = self.another("boot")

    def workers(self, emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        devices = NodeDevices({}, self.gpus.devices)
        found = devices.get(self.DEVICE)
        assert isinstance(found, SeparateDevice)
        self.device = found
        copies = Copies(devices, self.pool, emit)
        return Runs(self.pool, self.sources, emit, Threads(2, 2), copies=copies), Reclaimer(self.pool, emit)

    async def start(self) -> None:
        capabilities = (Capability(name=WEIGHTS_ON_GPU, available=True),)
        await self.loader.on_node_status(NodeOutline(node="n", capabilities=capabilities))

    def memory(self) -> DeviceMemory:
        self.check_pins()
        return super().memory()

    def check_pins(self) -> None:
        """Check that page-locked memory is there: a device reads the pages that were locked."""
        start = self.pool._address
        for address, nbytes in self.gpus.driver.pinned.items():
            assert self.pool.has_memory(address - start, nbytes)

    def read(self, instance: str, found: WeightsAttached) -> bytes:
        assert isinstance(found.handle, GpuUnitsHandle)
        ask = SocketMap(instance_id=instance, weights_id=found.weights_id)
        sent = self.loader.export_units(ask, self.gpus.exited.pid)
        units = [(u.start, u.nbytes) for u in found.handle.units]
        return b"".join(Gpu(machine=self.gpus).read_sent(found.handle, sent, units))

    async def stop(self) -> None:
        await super().stop()
        self.gpus.exited.close()
        self.gpus.check_closed()


BENCHES = (SeparateBench, GpuSeparateBench)


async def model(bench: Bench, directory: Path, *, changed: int = 0, hashed: bool = True, more: int = 0) -> ModelCard:
    """Write a model of ten units of a page: the last `changed`, and `more`, are its own."""
    seeds = [*range(TENSORS - changed), *range(100, 100 + changed + more)]
    weights = {f"t{i}": np.random.default_rng(seed).random(PAGE_BYTES // 4, dtype=np.float32) for i, seed in enumerate(seeds)}
    write_checkpoint(directory / "original", weights)
    if not hashed:
        return await bench.card(directory / "original")
    convert(directory / "original", directory / "converted")
    return await bench.card(directory / "converted")
