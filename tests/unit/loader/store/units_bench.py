"""A loader in one process with a GPU that keeps units, and engines' processes that map them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from shared.contracts.loader import WeightsAttached
from shared.contracts.models import ModelCard
from shared.contracts.segment import GpuUnitsHandle
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.devices.gpu_bench import GROUP, GpuBench
from weights.devices.opening import Devices
from weights.store.gpu_device import GpuDevice, gpu_devices
from weights.store.residency import KnownUnits
from weights.store.units import PAGE_BYTES

REUSE_PAGES = 4
DEVICE = "cuda:0"


class UnitsBench(GpuBench):
    """A loader with one GPU. It keeps up to `REUSE_PAGES` pages of units that no instance uses."""

    def open_devices(self) -> Devices:
        self.virtual_memory = FakeVirtualMemory()
        self.driver = FakeDriver(virtual_memory=self.virtual_memory)
        opened = gpu_devices(REUSE_PAGES * PAGE_BYTES, KnownUnits(), verify=True, load=lambda: self.virtual_memory)
        return Devices(lambda: self.driver, lambda *_: GROUP, opened)

    @property
    def device(self) -> GpuDevice:
        found = self.devices.get(DEVICE)
        assert isinstance(found, GpuDevice)
        return found

    def used_pages(self) -> tuple[int, int]:
        """Return the pages of mapped and of reusable units."""
        assert self.device.audit() == []
        used = self.device.pages()
        return used.mapped_bytes // PAGE_BYTES, used.reusable_bytes // PAGE_BYTES

    def allocated_pages(self) -> int:
        """Return the pages that any process keeps of the GPU's memory."""
        total = 64 * 1024 * 1024
        return (total - self.virtual_memory.free_bytes(0)) // PAGE_BYTES

    async def load(self, instance: str, card: ModelCard) -> WeightsAttached:
        found = await self.on(DEVICE, instance, card)
        assert isinstance(found.handle, GpuUnitsHandle)
        return found

    def units(self, found: WeightsAttached) -> list[str]:
        """Return the hashes of the units as host memory has them."""
        assert isinstance(found.handle, GpuUnitsHandle)
        content = self.in_host_memory(found)
        return [hashlib.sha256(content[u.offset : u.offset + u.nbytes]).hexdigest() for u in found.handle.units]


class Engine:
    """A process that maps an instance's units."""

    def __init__(self, path: Path, instance: str, found: WeightsAttached, kind: str = "stand-in") -> None:
        arguments = [sys.executable, "-m", "tests.support.mapped_gpu_units", str(path), instance, found.weights_id, kind]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert found.handle is not None
        self.say(found.handle.model_dump_json())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    async def seen(self) -> list[str]:
        """Return the hashes of the units as the process sees them."""
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            return (await asyncio.to_thread(self.process.stdout.readline)).split()

    async def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.process.communicate)


async def model(bench: UnitsBench, directory: Path, *seeds: int) -> ModelCard:
    """Write a model with a tensor of a page for each seed. Equal seeds: equal bytes."""
    weights = {
        f"layers.{i}.weight": np.random.default_rng(seed).standard_normal(PAGE_BYTES // 4, dtype=np.float32)
        for i, seed in enumerate(seeds)
    }
    write_checkpoint(directory, weights)
    return await bench.card(directory)
