"""Real GPUs in the place of the stand-in driver, for the suites of tests/unit."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import cast

import pytest

from shared.errors import DeviceMissing
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.store.gpu import Gpus
from weights.devices.cuda_runtime import CudaRuntime, load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory
from weights.devices.mapped_range import MappedRange
from weights.store.gpu_device import GpuDevice


def load_gpus(count: int = 1) -> CudaRuntime:
    """Return the driver. Skips the test unless there are `count` GPUs with exportable memory."""
    try:
        cuda = load_cuda()
    except DeviceMissing as e:
        pytest.skip(e.message)
    if cuda.count() < count:
        pytest.skip(f"the test needs {count} GPUs, and CUDA sees {cuda.count()}")
    for index in range(count):
        if not load_virtual_memory().is_supported(index):
            pytest.skip(f"cuda:{index} has no allocations that can be exported by file descriptor")
    return cuda


class RealGpus(Gpus):
    """The first GPUs of this machine. Their stores have no more than the pages of a test."""

    def load(self, nbytes: int, count: int) -> tuple[FakeVirtualMemory, FakeDriver]:
        self._cuda, self._memory = load_gpus(count), load_virtual_memory()
        # The suites that run here use nothing but the ports.
        return cast(FakeVirtualMemory, self._memory), cast(FakeDriver, self._cuda)

    def check_closed(self) -> None:
        """Check nothing: the driver does not list what a process has."""

    @contextlib.contextmanager
    def reserved(self, device: GpuDevice, nbytes: int) -> Iterator[MappedRange]:
        self._cuda.use(_index(device))
        units = MappedRange(self._memory, _index(device), nbytes)
        try:
            yield units
        finally:
            units.close()

    def read(self, device: GpuDevice, address: int, nbytes: int) -> bytes:
        seen = ctypes.create_string_buffer(nbytes)
        self._cuda.use(_index(device))
        self._cuda.copy_back(ctypes.addressof(seen), address, nbytes)
        return seen.raw

    def overwrite(self, device: GpuDevice, descriptor: int, nbytes: int, content: bytes) -> None:
        self._cuda.use(_index(device))
        imported, units = self._memory.import_descriptor(descriptor), MappedRange(self._memory, _index(device), nbytes)
        stream, host = self._cuda.stream(urgent=True), ctypes.create_string_buffer(content, len(content))
        try:
            units.map(0, nbytes, imported, writable=True)
            self._cuda.copy(units.address, ctypes.addressof(host), len(content), stream)
            self._cuda.wait(self._cuda.record(stream))
        finally:
            self._cuda.destroy_stream(stream)
            units.close()
            self._memory.release(imported)


def _index(device: GpuDevice) -> int:
    return int(device.device_id.removeprefix("cuda:"))
