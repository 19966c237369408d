"""A CUDA device on a driver that copies in host memory.

tests/gpu checks the same behaviour on the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shared.contracts.segment import CudaIpcHandle
from shared.errors import DeviceFailed, InsufficientMemory
from tests.support.launcher import until
from tests.unit.loader.devices.behaviour import PAGE, SEGMENT, DeviceBehaviour, Host
from tests.unit.loader.devices.fake_driver import TOTAL, FakeDriver
from tests.unit.loader.devices.ipc_memory import opened
from weights.devices.cuda import GRANULE, CudaDevice
from weights.devices.grouping import Run
from weights.devices.pinning import Pins
from weights.devices.port import Arena, Device, Place, Priority

GROUP = 4 * PAGE


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def test_a_broken_context_does_not_keep_the_loader_from_ending(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(driver, driver.facts(0), GROUP)

    def broken(_: object) -> None:
        raise DeviceFailed("cudaStreamDestroy: an illegal memory access was encountered")

    monkeypatch.setattr(driver, "destroy_stream", broken)
    device.close()


class TestCuda(DeviceBehaviour):
    @pytest.fixture(autouse=True)
    def _driver(self, driver: FakeDriver) -> Iterator[None]:
        self.driver = driver
        yield
        assert driver.unpinned_copies == 0
        assert driver.memory == {}
        assert driver.pinned == {}
        assert (driver.events, driver.streams) == (0, [])

    @pytest.fixture
    def device(self, _driver: None) -> Iterator[Device]:
        device = CudaDevice(self.driver, self.driver.facts(0), GROUP)
        yield device
        if self.driver.streams:
            device.close()

    def read(self, arena: Arena, nbytes: int) -> bytes:
        return opened(arena, self.driver, nbytes)

    def test_handle_names_the_gpu_by_its_bus_id(self, arena: Arena, device: Device) -> None:
        handle = arena.handle()
        assert isinstance(handle, CudaIpcHandle)
        assert (handle.device, handle.bus_id, handle.nbytes) == ("cuda:0", "0000:00:00.0", SEGMENT)
        assert device.link == "bus:cuda:0"

    def test_memory_is_allocated_in_whole_blocks(self, arena: Arena) -> None:
        assert [len(m) for m in self.driver.memory.values()] == [GRANULE]

    def test_allocation_beyond_the_device_memory_fails(self, device: Device) -> None:
        with pytest.raises(InsufficientMemory, match="out of memory"):
            device.allocate(Place("w", TOTAL + 1, "thaw-test"))

    def test_small_ranges_are_grouped_while_a_copy_runs(self, arena: Arena, host: Host) -> None:
        self.driver.gate.clear()
        arena.fill(0, host.address, 100)
        self.driver.await_copies(1)
        for start in range(100, 2 * GROUP, 100):
            arena.fill(start, host.address + start, min(100, 2 * GROUP - start))
        self.driver.gate.set()
        assert arena.wait(2 * GROUP)
        assert self.driver.copies[0] == (0, 100, True)
        assert len(self.driver.copies) <= 4
        assert sum(n for _, n, _ in self.driver.copies) == 2 * GROUP

    def test_long_range_is_split_so_that_others_may_overtake(self, device: Device, host: Host) -> None:
        background, request = (
            device.allocate(Place(p.name, SEGMENT, "thaw-test"), p) for p in (Priority.BACKGROUND, Priority.REQUEST)
        )
        self.driver.gate.clear()
        background.fill(0, host.address, SEGMENT)
        self.driver.await_copies(4)
        request.fill(0, host.address, GROUP)
        self.driver.gate.set()
        assert request.wait(GROUP)
        assert background.wait(SEGMENT)
        assert [c[2] for c in self.driver.copies[:6]] == [False] * 4 + [True, False]
        assert all(n <= GROUP for _, n, _ in self.driver.copies)

    @pytest.mark.parametrize("fault", ["fail_copy", "fail_event"])
    def test_a_driver_error_is_raised_to_the_waiter(self, device: Device, host: Host, fault: str) -> None:
        arena = device.allocate(Place("w", SEGMENT, "thaw-test"))
        setattr(self.driver, fault, True)
        arena.fill(0, host.address, SEGMENT)
        with pytest.raises(DeviceFailed, match="cuda"):
            arena.wait(SEGMENT)
        with pytest.raises(DeviceFailed, match="cuda"):
            arena.fill(0, host.address, 1)
        other = device.allocate(Place("v", SEGMENT, "thaw-test"))
        other.fill(0, host.address, SEGMENT)
        assert other.wait(SEGMENT)
        self.check(other, host)
        assert arena.release() == SEGMENT

    def test_unexpected_error_ends_no_thread(self, device: Device, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        """An unexpected error ends no thread.

        A binding may refuse an argument: without the thread every later load would wait for ever.
        """

        def refuse(*_: object) -> None:
            raise OverflowError("an argument is out of range")

        with monkeypatch.context() as patched:
            patched.setattr(self.driver, "copy", refuse)
            arena = device.allocate(Place("w", SEGMENT, "thaw-test"))
            arena.fill(0, host.address, SEGMENT)
            waited: list[BaseException] = []

            def wait() -> None:
                try:
                    arena.wait(SEGMENT)
                except DeviceFailed as e:
                    waited.append(e)

            waiter = threading.Thread(target=wait, daemon=True)
            waiter.start()
            waiter.join(60)
        assert [str(e) for e in waited] == ["an argument is out of range"]
        other = device.allocate(Place("v", SEGMENT, "thaw-test"))
        other.fill(0, host.address, SEGMENT)
        assert other.wait(SEGMENT)

    def test_memory_is_not_freed_under_a_copy(self, device: Device, host: Host) -> None:
        arena = device.allocate(Place("w", SEGMENT, "thaw-test"))
        self.driver.gate.clear()
        arena.fill(0, host.address, SEGMENT)
        self.driver.await_copies(4)
        done: list[int] = []
        releasing = threading.Thread(target=lambda: done.append(arena.release()))
        releasing.start()
        assert isinstance(device, CudaDevice)
        until(lambda: not device._arenas, 60, "the release has begun")
        releasing.join(0.05)
        assert releasing.is_alive()
        assert len(self.driver.memory) == 1
        self.driver.gate.set()
        releasing.join(60)
        assert done == [SEGMENT]
        assert len(self.driver.copies) == 4
        assert device.queued_bytes == 0

    def test_queue_and_bandwidth_are_reported(self, device: Device, arena: Arena, host: Host) -> None:
        before = device.bytes_per_second
        self.driver.gate.clear()
        arena.fill(0, host.address, SEGMENT)
        assert device.queued_bytes == SEGMENT
        self.driver.gate.set()
        assert arena.wait(SEGMENT)
        rate = device.bytes_per_second
        assert device.copied_bytes == SEGMENT
        assert before is None
        assert rate is not None
        assert rate > 0

    def test_several_devices_copy_at_the_same_time(self, host: Host) -> None:
        devices = [CudaDevice(self.driver, self.driver.facts(n), GROUP, pins=Pins(self.driver)) for n in (0, 1)]
        arenas = [d.allocate(Place("w", SEGMENT, "thaw-test")) for d in devices]
        self.driver.gate.clear()
        for arena in arenas:
            arena.fill(0, host.address, SEGMENT)
        self.driver.await_copies(8)  # a window of four each: neither waits for the other
        self.driver.gate.set()
        for device, arena in zip(devices, arenas, strict=True):
            assert arena.wait(SEGMENT)
            assert self.read(arena, SEGMENT) == host.content
            device.close()


def test_memory_is_pinned_once_and_another_length_refused(driver: FakeDriver) -> None:
    driver.use(0)
    pins = Pins(driver)
    pins.pin(4096, 8192)
    pins.pin(4096, 8192)
    assert (driver.pinned, pins.nbytes) == ({4096: 8192}, 8192)
    with pytest.raises(ValueError, match="page-locked"):
        pins.pin(4096, 4096)
    pins.unpin(4096)
    pins.unpin(4096)
    pins.pin(0, 4096)
    pins.close()
    assert driver.pinned == {}


def test_failed_pin_is_not_recorded(driver: FakeDriver) -> None:
    driver.use(0)
    driver.pinned[4096] = 1
    pins = Pins(driver)
    with pytest.raises(DeviceFailed, match="already registered"):
        pins.pin(4096, 4096)
    assert pins.nbytes == 0


def test_ranges_are_split_at_boundaries_of_pinned_memory(driver: FakeDriver) -> None:
    driver.use(0)
    pins = Pins(driver)
    for address, nbytes in ((100, 50), (150, 50), (300, 100)):
        pins.pin(address, nbytes)
    assert pins.runs(0, 120, 20) == [Run(0, 120, 20, 100)]
    assert pins.runs(7, 120, 60) == [Run(7, 120, 30, 100), Run(37, 150, 30, 150)]
    assert pins.runs(0, 50, 400) == [
        Run(0, 50, 50),
        Run(50, 100, 50, 100),
        Run(100, 150, 50, 150),
        Run(150, 200, 100),
        Run(250, 300, 100, 300),
        Run(350, 400, 50),
    ]
    pins.unpin(150)
    assert pins.runs(0, 120, 60) == [Run(0, 120, 30, 100), Run(30, 150, 30)]
    pins.close()


def test_a_segment_over_several_chunks_is_copied_chunk_by_chunk(driver: FakeDriver) -> None:
    host = Host()
    device = CudaDevice(driver, driver.facts(0), 64 * PAGE)
    for at in range(0, len(host.memory), 8 * PAGE):
        device.pin(host.address + at, min(8 * PAGE, len(host.memory) - at))
    arena = device.allocate(Place("w", SEGMENT, "thaw-test"))
    arena.fill(0, host.address, SEGMENT)
    assert arena.wait(SEGMENT)
    assert [n for _, n, _ in driver.copies] == [8 * PAGE] * 5 + [123]
    assert opened(arena, driver, SEGMENT) == host.content
    device.close()
    device.close()
