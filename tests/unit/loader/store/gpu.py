"""Stores of GPUs on the stand-in driver, and what an engine sees of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from shared.contracts.segment import GpuUnitsHandle
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.curve import FALLBACK_BYTES
from weights.devices.driver import CudaDriver, DeviceFacts
from weights.devices.mapped_range import MappedRange
from weights.devices.opening import Devices
from weights.devices.pinning import Pins
from weights.store.arena import PagedArena
from weights.store.gpu_device import GpuDevice, gpu_devices
from weights.store.residency import KnownUnits
from weights.store.units import PAGE_BYTES


class Gpus:
    """A machine with GPUs of `pages` pages each, all of which are the store's.

    `tests.gpu.real_gpus` has one with real GPUs.

    Args:
        reuse_pages: Pages of units without an instance that may stay on each; None: all.
        lends_kv: The stores lend pages.
    """

    def __init__(
        self,
        pages: int,
        count: int = 1,
        *,
        verify: bool = False,
        reuse_pages: int | None = None,
        known: KnownUnits | None = None,
        lends_kv: bool = False,
    ) -> None:
        self.virtual_memory, self.driver = self.load(pages * PAGE_BYTES, count)
        kept = (pages if reuse_pages is None else reuse_pages) * PAGE_BYTES
        opened = gpu_devices(kept, known or KnownUnits(), lends_kv=lends_kv, verify=verify, load=lambda: self.virtual_memory)

        def open_device(driver: CudaDriver, facts: DeviceFacts, group_bytes: int, pins: Pins) -> GpuDevice:
            return opened(driver, replace(facts, total_bytes=pages * PAGE_BYTES), group_bytes, pins)

        self.devices = Devices(lambda: self.driver, lambda *_: FALLBACK_BYTES, open_device)
        self.exited = Exited()

    def load(self, nbytes: int, count: int) -> tuple[FakeVirtualMemory, FakeDriver]:
        """Return the drivers of `count` GPUs of `nbytes` each."""
        memory = FakeVirtualMemory(nbytes, count)
        return memory, FakeDriver(count, memory, total_bytes=nbytes)

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

    @contextlib.contextmanager
    def reserved(self, device: GpuDevice, nbytes: int) -> Iterator[MappedRange]:
        """Reserve addresses as an engine on the device does."""
        engine = FakeVirtualMemory(0)
        units = MappedRange(engine, 0, nbytes)
        try:
            yield units
        finally:
            units.close()
            assert engine.handles == {}

    def read(self, device: GpuDevice, address: int, nbytes: int) -> bytes:
        """Return what work on the device reads."""
        return ctypes.string_at(address, nbytes)

    def overwrite(self, device: GpuDevice, descriptor: int, nbytes: int, content: bytes) -> None:
        """Change the first bytes of an allocation of `nbytes`."""
        engine = FakeVirtualMemory(0)
        imported, units = engine.import_descriptor(descriptor), MappedRange(engine, 0, nbytes)
        units.map(0, nbytes, imported, writable=True)
        ctypes.memmove(units.address, content, len(content))
        units.close()
        engine.release(imported)


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
        self.device = self._machine.get(device_id)

    def close(self) -> None:
        """Close the machine, and check that it has given everything back."""
        self._machine.close()

    def read(self, arena: PagedArena, handle: GpuUnitsHandle, places: Iterable[tuple[int, int]]) -> list[bytes]:
        """Map the units as an engine does, and return ranges of bytes: first byte and length."""
        indexes = tuple(range(len(handle.units)))
        return self.read_sent(handle, [(indexes, partial(self.device.export, arena, indexes, self._machine.exited.pid))], places)

    def read_sent(
        self,
        handle: GpuUnitsHandle,
        sent: Iterable[tuple[tuple[int, ...], Callable[[], list[int]]]],
        places: Iterable[tuple[int, int]],
    ) -> list[bytes]:
        """Map units that a loader sends, and return ranges of bytes: first byte and length."""
        ends = [*(u.start for u in handle.units[1:]), handle.nbytes]
        with self._machine.reserved(self.device, handle.nbytes) as units:
            for indexes, export in sent:
                for index, descriptor in zip(indexes, export(), strict=True):
                    start = handle.units[index].start
                    try:
                        units.map_descriptor(start, ends[index] - start, descriptor)
                    finally:
                        os.close(descriptor)
            return [self._machine.read(self.device, units.address + start, nbytes) for start, nbytes in places]

    def overwrite(self, arena: PagedArena, index: int, content: bytes) -> None:
        """Change the first bytes of a unit."""
        nbytes = len(self.device.store().units[arena.keys[index]].pages) * PAGE_BYTES
        [descriptor] = self.device.export(arena, [index], self._machine.exited.pid)
        try:
            self._machine.overwrite(self.device, descriptor, nbytes, content)
        finally:
            os.close(descriptor)
