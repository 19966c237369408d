"""Stores of GPUs on the stand-in driver, and what an engine sees of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator

from shared.contracts.segment import GpuUnitsHandle
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.curve import FALLBACK_BYTES
from weights.devices.mapped_range import MappedRange
from weights.devices.opening import Devices
from weights.store.arena import PagedArena
from weights.store.gpu_device import GpuDevice, gpu_devices
from weights.store.residency import KnownUnits
from weights.store.units import PAGE_BYTES


class Gpus:
    """A machine with GPUs of `pages` pages each, all of which are the store's.

    `reuse_pages`: pages of units without an instance that may stay on each; None: all.
    """

    def __init__(
        self,
        pages: int,
        count: int = 1,
        *,
        verify: bool = False,
        reuse_pages: int | None = None,
        known: KnownUnits | None = None,
    ) -> None:
        self.virtual_memory = FakeVirtualMemory(pages * PAGE_BYTES, count)
        self.driver = FakeDriver(count, self.virtual_memory, total_bytes=pages * PAGE_BYTES)
        kept = (pages if reuse_pages is None else reuse_pages) * PAGE_BYTES
        opened = gpu_devices(kept, known or KnownUnits(), verify=verify, load=lambda: self.virtual_memory)
        self.devices = Devices(lambda: self.driver, lambda *_: FALLBACK_BYTES, opened)
        self.exited = Exited()

    def get(self, device_id: str) -> GpuDevice:
        """Return a GPU, opened if it is not yet."""
        found = self.devices.get(device_id)
        assert isinstance(found, GpuDevice)
        return found

    def close(self) -> None:
        """Close the devices, and check that they have given everything back."""
        self.devices.close()
        self.exited.close()
        self.check_closed()

    def check_closed(self) -> None:
        """Check that the closed devices have given everything back."""
        vm = self.virtual_memory
        assert (vm.handles, vm.mappings, vm.reservations) == ({}, {}, {})
        assert (self.driver.streams, self.driver.events, self.driver.pinned) == ([], 0, {})


class Exited:
    """A process that units are sent to and that maps none: it has exited, and is not waited for."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["true"])
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.wait()


def read_units(handle: GpuUnitsHandle, sent: Iterable[tuple[tuple[int, ...], Callable[[], list[int]]]]) -> bytes:
    """Map units that a loader sends as an engine does, and return their bytes in order."""
    engine = FakeVirtualMemory(0)
    units, ends = MappedRange(engine, 0, handle.nbytes), [*(u.start for u in handle.units[1:]), handle.nbytes]
    try:
        for indexes, export in sent:
            for index, descriptor in zip(indexes, export(), strict=True):
                start = handle.units[index].start
                try:
                    units.map_descriptor(start, ends[index] - start, descriptor)
                finally:
                    os.close(descriptor)
        return b"".join(ctypes.string_at(units.address + u.start, u.nbytes) for u in handle.units)
    finally:
        units.close()


class Gpu:
    """One GPU of `machine`, or of a machine of its own with the memory of `pages` pages."""

    def __init__(
        self,
        pages: int = 0,
        *,
        verify: bool = False,
        reuse_pages: int | None = None,
        machine: Gpus | None = None,
        device_id: str = "cuda:0",
    ) -> None:
        self._machine = machine or Gpus(pages, verify=verify, reuse_pages=reuse_pages)
        self.virtual_memory, self.driver = self._machine.virtual_memory, self._machine.driver
        self.device = self._machine.get(device_id)
        self._exited = self._machine.exited

    def close(self) -> None:
        """Close the machine, and check that it has given everything back."""
        self._machine.close()

    def nbytes(self, arena: PagedArena, index: int) -> int:
        """Return the bytes of a unit's memory."""
        return len(self.device.store().units[arena.keys[index]].pages) * PAGE_BYTES

    @contextlib.contextmanager
    def mapped(self, arena: PagedArena, handle: GpuUnitsHandle) -> Iterator[int]:
        """Map the units as an engine does. Yields the first address."""
        engine = FakeVirtualMemory(0)
        units = MappedRange(engine, 0, handle.nbytes)
        try:
            for index, unit in enumerate(handle.units):
                [descriptor] = self.device.export(arena, [index], self._exited.pid)
                try:
                    units.map_descriptor(unit.start, self.nbytes(arena, index), descriptor)
                finally:
                    os.close(descriptor)
            yield units.address
        finally:
            units.close()
            assert engine.handles == {}

    def overwrite(self, arena: PagedArena, index: int, content: bytes) -> None:
        """Change the first bytes of a unit."""
        engine, nbytes = FakeVirtualMemory(0), self.nbytes(arena, index)
        [descriptor] = self.device.export(arena, [index], self._exited.pid)
        imported, units = engine.import_descriptor(descriptor), MappedRange(engine, 0, nbytes)
        os.close(descriptor)
        units.map(0, nbytes, imported, writable=True)
        ctypes.memmove(units.address, content, len(content))
        units.close()
        engine.release(imported)
