"""Host memory as a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.contracts.segment import Extent, SharedMemoryHandle
from tests.unit.loader.devices.behaviour import DeviceBehaviour, Host
from weights.devices.cpu import CpuDevice
from weights.devices.port import Arena, Device, Place


class TestCpu(DeviceBehaviour):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = CpuDevice()
        yield device
        device.close()

    def check(self, arena: Arena, host: Host) -> None:
        """Check that there is no copy: the engine maps the pool itself."""

    def test_handle_names_the_extents_in_the_pool(self, device: Device) -> None:
        extents = (Extent(offset=0, nbytes=4096), Extent(offset=16384, nbytes=4096))
        arena = device.allocate(Place("w", 8000, "thaw-pool", extents))
        assert arena.handle() == SharedMemoryHandle(device="cpu:0", nbytes=8000, segment="thaw-pool", extents=extents)
        assert (device.link, device.bytes_per_second) == (None, None)
