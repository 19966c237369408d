"""The stand-in for CUDA's virtual memory management keeps CUDA's rules."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import DeviceFailed, InsufficientMemory
from tests.support.fake_virtual_memory import GRANULARITY, FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.mapped_range import MappedRange
from weights.devices.virtual_memory import Allocation, VirtualMemory

TOTAL = 4 * GRANULARITY


@pytest.fixture
def memory() -> Iterator[FakeVirtualMemory]:
    memory = FakeVirtualMemory(TOTAL)
    yield memory
    for address, mapping in list(memory.mappings.items()):
        memory.unmap(address, mapping.nbytes)
    for address, nbytes in list(memory.reservations.items()):
        memory.free_reservation(address, nbytes)
    for allocation in list(memory.handles):
        memory.release(allocation)


def mapped(memory: FakeVirtualMemory, allocation: Allocation, nbytes: int, *, writable: bool = True) -> int:
    address = memory.reserve(nbytes)
    memory.map(address, nbytes, allocation)
    memory.set_access(address, nbytes, 0, writable=writable)
    return address


def test_stand_in_has_every_call_of_the_port(memory: FakeVirtualMemory) -> None:
    port: VirtualMemory = memory
    assert port.is_supported(0)
    assert not port.is_supported(1)
    assert port.granularity(0) == GRANULARITY


@pytest.mark.parametrize("nbytes", [0, 1, GRANULARITY + 4096])
def test_sizes_are_multiples_of_the_granularity(memory: FakeVirtualMemory, nbytes: int) -> None:
    with pytest.raises(DeviceFailed, match=r"cuMemCreate: .*INVALID_VALUE"):
        memory.create(0, nbytes)
    with pytest.raises(DeviceFailed, match=r"cuMemAddressReserve: .*INVALID_VALUE"):
        memory.reserve(nbytes)


def test_larger_granularity_is_kept(memory: FakeVirtualMemory) -> None:
    memory.granularity_bytes = 2 * GRANULARITY
    with pytest.raises(DeviceFailed, match="no multiples"):
        memory.create(0, GRANULARITY)
    assert memory.reserve(2 * GRANULARITY) % (2 * GRANULARITY) == 0


def test_two_mappings_of_an_allocation_show_the_same_bytes(memory: FakeVirtualMemory) -> None:
    allocation = memory.create(0, GRANULARITY)
    first, second = (mapped(memory, allocation, GRANULARITY) for _ in range(2))
    ctypes.memmove(first, b"weights", 7)
    assert first != second
    assert ctypes.string_at(second, 7) == b"weights"


def test_memory_that_is_not_exportable_stays_in_its_process(memory: FakeVirtualMemory) -> None:
    allocation = memory.create(0, GRANULARITY, exportable=False)
    with pytest.raises(DeviceFailed, match="not created for export"):
        memory.export_descriptor(allocation)
    address = mapped(memory, allocation, GRANULARITY)
    ctypes.memmove(address, b"keys", 4)
    assert ctypes.string_at(address, 4) == b"keys"


def test_memory_is_not_unmapped_while_work_uses_it(memory: FakeVirtualMemory) -> None:
    address = mapped(memory, memory.create(0, GRANULARITY), GRANULARITY)
    memory.issue(address + 4096, 1)
    with pytest.raises(DeviceFailed, match=r"cuMemUnmap: .*may still use"):
        memory.unmap(address, GRANULARITY)
    memory.synchronize()
    memory.unmap(address, GRANULARITY)


def test_several_allocations_get_access_at_once(memory: FakeVirtualMemory) -> None:
    found = MappedRange(memory, 0, 3 * GRANULARITY)
    pages = [memory.create(0, GRANULARITY) for _ in range(2)]
    found.map_writable(GRANULARITY, GRANULARITY, pages)
    assert memory.can_access(found.address + GRANULARITY, 2 * GRANULARITY, writable=True)
    with pytest.raises(DeviceFailed, match="mapped there already"):
        found.map_writable(0, GRANULARITY, [memory.create(0, GRANULARITY), pages[0]])
    assert found.address not in memory.mappings, "none of them is mapped after a failure"
    with pytest.raises(DeviceFailed, match="outside a range"):
        found.map_writable(2 * GRANULARITY, GRANULARITY, pages)
    found.unmap(2 * GRANULARITY)
    found.close()


def test_allocations_in_any_order_are_one_range(memory: FakeVirtualMemory) -> None:
    allocations = [memory.create(0, GRANULARITY) for _ in range(3)]
    for n, allocation in enumerate(allocations):
        address = mapped(memory, allocation, GRANULARITY)
        ctypes.memmove(address, bytes([n]) * GRANULARITY, GRANULARITY)
    start = memory.reserve(3 * GRANULARITY)
    for place, n in enumerate((2, 0, 1)):
        memory.map(start + place * GRANULARITY, GRANULARITY, allocations[n])
    memory.set_access(start, 3 * GRANULARITY, 0, writable=False)
    assert ctypes.string_at(start, 3 * GRANULARITY) == b"".join(bytes([n]) * GRANULARITY for n in (2, 0, 1))


def test_addresses_are_mapped_once(memory: FakeVirtualMemory) -> None:
    small, large = memory.create(0, GRANULARITY), memory.create(0, 2 * GRANULARITY)
    start = memory.reserve(2 * GRANULARITY)
    memory.map(start + GRANULARITY, GRANULARITY, small)
    for address, allocation, nbytes in ((start + GRANULARITY, small, GRANULARITY), (start, large, 2 * GRANULARITY)):
        with pytest.raises(DeviceFailed, match=r"cuMemMap: .*mapped there already"):
            memory.map(address, nbytes, allocation)
    memory.unmap(start + GRANULARITY, GRANULARITY)
    memory.map(start, 2 * GRANULARITY, large)


def test_only_reserved_addresses_are_mapped_and_only_whole_allocations(memory: FakeVirtualMemory) -> None:
    allocation, start = memory.create(0, 2 * GRANULARITY), memory.reserve(2 * GRANULARITY)
    with pytest.raises(DeviceFailed, match="not reserved"):
        memory.map(start + GRANULARITY, 2 * GRANULARITY, allocation)
    with pytest.raises(DeviceFailed, match="not that of the allocation"):
        memory.map(start, GRANULARITY, allocation)
    memory.map(start, 2 * GRANULARITY, allocation)
    with pytest.raises(DeviceFailed, match=r"cuMemUnmap: .*no mapping"):
        memory.unmap(start, GRANULARITY)


def test_a_reservation_is_freed_whole_and_after_its_mappings(memory: FakeVirtualMemory) -> None:
    allocation, start = memory.create(0, GRANULARITY), memory.reserve(2 * GRANULARITY)
    memory.map(start, GRANULARITY, allocation)
    with pytest.raises(DeviceFailed, match=r"cuMemAddressFree: .*mapped there"):
        memory.free_reservation(start, 2 * GRANULARITY)
    memory.unmap(start, GRANULARITY)
    with pytest.raises(DeviceFailed, match="no reservation has this address and size"):
        memory.free_reservation(start, GRANULARITY)
    memory.free_reservation(start, 2 * GRANULARITY)
    with pytest.raises(DeviceFailed, match="not reserved"):
        memory.map(start, GRANULARITY, allocation)


def test_access_is_set_for_whole_mappings_only(memory: FakeVirtualMemory) -> None:
    allocation, start = memory.create(0, 2 * GRANULARITY), memory.reserve(3 * GRANULARITY)
    memory.map(start, 2 * GRANULARITY, allocation)
    for nbytes in (GRANULARITY, 3 * GRANULARITY):
        with pytest.raises(DeviceFailed, match=r"cuMemSetAccess: .*whole mappings"):
            memory.set_access(start, nbytes, 0, writable=True)
    with pytest.raises(DeviceFailed, match="INVALID_DEVICE"):
        memory.set_access(start, 2 * GRANULARITY, 1, writable=True)


def test_memory_is_free_after_the_last_handle_and_mapping(memory: FakeVirtualMemory) -> None:
    allocation = memory.create(0, 3 * GRANULARITY)
    address = mapped(memory, allocation, 3 * GRANULARITY)
    memory.release(allocation)
    with pytest.raises(DeviceFailed, match="is no handle"):
        memory.release(allocation)
    ctypes.memmove(address, b"kept", 4)
    assert memory.free_bytes(0) == GRANULARITY
    with pytest.raises(InsufficientMemory, match="OUT_OF_MEMORY"):
        memory.create(0, 2 * GRANULARITY)
    memory.unmap(address, 3 * GRANULARITY)
    assert memory.free_bytes(0) == TOTAL


def test_a_descriptor_keeps_the_allocation(memory: FakeVirtualMemory) -> None:
    allocation = memory.create(0, GRANULARITY)
    ctypes.memmove(mapped(memory, allocation, GRANULARITY), b"unit", 4)
    descriptor = memory.export_descriptor(allocation)
    memory.release(allocation)
    for address, mapping in list(memory.mappings.items()):
        memory.unmap(address, mapping.nbytes)
    assert memory.free_bytes(0) == TOTAL - GRANULARITY
    imported = memory.import_descriptor(descriptor)
    os.close(descriptor)
    assert ctypes.string_at(mapped(memory, imported, GRANULARITY, writable=False), 4) == b"unit"
    memory.release(imported)
    for address, mapping in list(memory.mappings.items()):
        memory.unmap(address, mapping.nbytes)
    assert memory.free_bytes(0) == TOTAL


def test_a_descriptor_of_another_kind_is_refused(memory: FakeVirtualMemory) -> None:
    with (
        Path(os.devnull).open("rb") as other,
        pytest.raises(DeviceFailed, match=r"cuMemImportFromShareableHandle: .*no allocation"),
    ):
        memory.import_descriptor(other.fileno())


READER = """
import ctypes, os, socket, sys
from tests.support.fake_virtual_memory import GRANULARITY, FakeVirtualMemory
memory, peer = FakeVirtualMemory(0), socket.socket(fileno=int(sys.argv[1]))
_, (descriptor,), _, _ = socket.recv_fds(peer, 1, 1)
imported, start = memory.import_descriptor(descriptor), memory.reserve(GRANULARITY)
memory.map(start, GRANULARITY, imported)
memory.set_access(start, GRANULARITY, 0, writable=False)
memory.release(imported)
os.close(descriptor)
peer.sendall(ctypes.string_at(start, 4))
peer.recv(1)
ctypes.memmove(start, b"gone", 4)
"""


def test_another_process_maps_a_unit_read_only_and_keeps_it(memory: FakeVirtualMemory) -> None:
    allocation = memory.create(0, GRANULARITY)
    address = mapped(memory, allocation, GRANULARITY)
    ctypes.memmove(address, b"unit", 4)
    mine, theirs = socket.socketpair()
    mine.settimeout(60)
    with (
        contextlib.closing(mine),
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(READER), str(theirs.fileno())], pass_fds=[theirs.fileno()]
        ) as process,
    ):
        theirs.close()
        descriptor = memory.export_descriptor(allocation)
        socket.send_fds(mine, [b"u"], [descriptor])
        os.close(descriptor)
        assert mine.recv(4) == b"unit"
        memory.unmap(address, GRANULARITY)
        memory.release(allocation)
        assert memory.free_bytes(0) == TOTAL - GRANULARITY, "the reader's mapping keeps the memory"
        mine.sendall(b"w")
        assert process.wait(60) == -signal.SIGSEGV, "a write through a read-only mapping"
    assert memory.free_bytes(0) == TOTAL


@pytest.mark.parametrize("has_links", [True, False])
def test_a_device_reads_the_memory_of_another_if_it_was_let(*, has_links: bool) -> None:
    two = FakeVirtualMemory(TOTAL, devices=2)
    two.has_links = has_links
    driver = FakeDriver(2, two, total_bytes=TOTAL)
    places = []
    for device in range(2):
        allocation, start = two.create(device, GRANULARITY), two.reserve(GRANULARITY)
        two.map(start, GRANULARITY, allocation)
        two.set_access(start, GRANULARITY, device, writable=True)
        places.append(start)
    ctypes.memmove(places[0], b"weights", 7)
    assert driver.can_access_peer(1, 0) == has_links
    if has_links:
        two.set_access(places[0], GRANULARITY, 1, writable=False)
        assert two.can_access(places[0], 7, writable=True, device=0), "the rights of others stay"
        assert not two.can_access(places[0], 7, writable=True, device=1)
    else:
        with pytest.raises(DeviceFailed, match="no access to the other one's memory"):
            two.set_access(places[0], GRANULARITY, 1, writable=False)
    driver.use(0)
    other = driver.stream(urgent=True)
    driver.use(1)
    stream = driver.stream(urgent=True)
    driver.copy_from_peer(places[1], 1, places[0], 0, 7, stream)
    driver.wait(driver.record(stream))
    assert ctypes.string_at(places[1], 7) == b"weights"
    assert driver.peer_copies == [(0, 1, 7, has_links)]
    with pytest.raises(DeviceFailed, match="the stream is another device's"):
        driver.record(other)
    with pytest.raises(DeviceFailed, match="no access to its own range"):
        driver.copy_from_peer(places[0], 1, places[1], 0, 7, stream)
    for each in (stream, other):
        driver.destroy_stream(each)


class TestCopies:
    """The driver's copies go where the device has access."""

    @pytest.fixture
    def driver(self, memory: FakeVirtualMemory) -> FakeDriver:
        driver = FakeDriver(virtual_memory=memory)
        driver.use(0)
        return driver

    def test_a_copy_reaches_a_writable_mapping(self, driver: FakeDriver, memory: FakeVirtualMemory) -> None:
        address = mapped(memory, memory.create(0, GRANULARITY), GRANULARITY)
        source, target = ctypes.create_string_buffer(b"weights"), ctypes.create_string_buffer(7)
        stream = driver.stream(urgent=True)
        driver.copy(address + 5, ctypes.addressof(source), 7, stream)
        driver.wait(driver.record(stream))
        driver.copy_back(ctypes.addressof(target), address + 5, 7)
        driver.destroy_stream(stream)
        assert target.raw == b"weights"

    @pytest.mark.parametrize("is_mapped", [True, False])
    def test_a_copy_without_access_fails(self, driver: FakeDriver, memory: FakeVirtualMemory, *, is_mapped: bool) -> None:
        allocation, start = memory.create(0, GRANULARITY), memory.reserve(GRANULARITY)
        if is_mapped:
            memory.map(start, GRANULARITY, allocation)
        stream, host = driver.stream(urgent=True), ctypes.create_string_buffer(8)
        with pytest.raises(DeviceFailed, match="cudaMemcpyAsync: an illegal memory access"):
            driver.copy(start, ctypes.addressof(host), 8, stream)
        with pytest.raises(DeviceFailed, match="cudaMemcpy: an illegal memory access"):
            driver.copy_back(ctypes.addressof(host), start, 8)
        driver.destroy_stream(stream)

    def test_a_read_only_mapping_is_read_and_not_written(self, driver: FakeDriver, memory: FakeVirtualMemory) -> None:
        address, host = mapped(memory, memory.create(0, GRANULARITY), GRANULARITY, writable=False), ctypes.create_string_buffer(8)
        stream = driver.stream(urgent=True)
        driver.copy_back(ctypes.addressof(host), address, 8)
        with pytest.raises(DeviceFailed, match="illegal memory access"):
            driver.copy(address, ctypes.addressof(host), 8, stream)
        driver.destroy_stream(stream)

    def test_both_kinds_of_memory_count_against_the_device(self, driver: FakeDriver, memory: FakeVirtualMemory) -> None:
        before = driver.free_bytes()
        memory.create(0, GRANULARITY)
        assert driver.free_bytes() == before - GRANULARITY
