"""A GPU's store on the stand-in driver, and what an engine sees of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

from shared.contracts.segment import GpuUnitsHandle
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.curve import FALLBACK_BYTES
from weights.devices.mapped_range import MappedRange
from weights.devices.pinning import Pins
from weights.store.arena import PagedArena
from weights.store.gpu_device import GpuDevice
from weights.store.units import PAGE_BYTES


class Gpu:
    """One GPU with the memory of `pages` pages, all of which are the store's.

    `reuse_pages`: pages of units without an instance that may stay; None: all.
    """

    def __init__(self, pages: int, *, verify: bool = False, reuse_pages: int | None = None) -> None:
        self.virtual_memory = FakeVirtualMemory(pages * PAGE_BYTES)
        self.driver = FakeDriver(virtual_memory=self.virtual_memory)
        self.driver.use(0)
        self.pins = Pins(self.driver)
        facts = replace(self.driver.facts(0), total_bytes=pages * PAGE_BYTES)
        kept = (pages if reuse_pages is None else reuse_pages) * PAGE_BYTES
        self.device = GpuDevice(self.driver, self.virtual_memory, facts, FALLBACK_BYTES, self.pins, reuse_bytes=kept, verify=verify)
        # It has exited and is not waited for: a process that units are sent to and that maps none.
        self._exited = subprocess.Popen(["true"])
        os.waitid(os.P_PID, self._exited.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """Close the device, and check that it has given everything back."""
        self.device.close()
        self._exited.wait()
        vm = self.virtual_memory
        assert (vm.handles, vm.mappings, vm.reservations) == ({}, {}, {})
        assert (self.driver.streams, self.driver.events, self.driver.pinned) == ([], 0, {})

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
