"""A GPU's memory for units: one allocation each, which others never get."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.errors import DeviceFailed, EngineFailed, InsufficientMemory
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.support.stopping import killed_at_exit
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.devices.mapped_range import MappedRange
from weights.devices.pinning import Pins
from weights.store.gpu_memory import GpuMemory
from weights.store.pages import Store, StoredUnit, audit, complete, give_up, release, reserve
from weights.store.receivers import Receivers
from weights.store.units import PAGE_BYTES, Unit

PAGES = 4


@pytest.fixture
def virtual_memory() -> FakeVirtualMemory:
    return FakeVirtualMemory(PAGES * PAGE_BYTES)


@pytest.fixture
def driver(virtual_memory: FakeVirtualMemory) -> FakeDriver:
    return FakeDriver(virtual_memory=virtual_memory)


@pytest.fixture
def memory(driver: FakeDriver, virtual_memory: FakeVirtualMemory) -> Iterator[GpuMemory]:
    memory = GpuMemory(driver, virtual_memory, 0, Pins(driver))
    yield memory
    memory.close()
    assert (virtual_memory.handles, virtual_memory.mappings, virtual_memory.reservations) == ({}, {}, {})
    assert driver.streams == []


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    with killed_at_exit(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)) as process:
        yield process
        process.kill()


def unit(key: str, *pages: int) -> StoredUnit:
    return StoredUnit(key, len(pages) * PAGE_BYTES - 5, pages, frozenset({"a"}), "a")


def write(memory: GpuMemory, stored: StoredUnit, content: bytes) -> None:
    host = ctypes.create_string_buffer(content, len(content))
    memory.write(stored, 3, ctypes.addressof(host), len(content))


def read(memory: GpuMemory, stored: StoredUnit, nbytes: int) -> bytes:
    return b"".join(bytes(view) for view in memory.views(stored, 3, nbytes))


def test_scattered_pages_are_one_allocation(memory: GpuMemory, virtual_memory: FakeVirtualMemory) -> None:
    stored = unit("u", 3, 0, 2)
    content = os.urandom(2 * PAGE_BYTES)
    write(memory, stored, content)
    assert read(memory, stored, len(content)) == content
    assert len(virtual_memory.handles) == 1
    assert memory.allocated_bytes() == 3 * PAGE_BYTES


def test_a_unit_with_the_pages_of_another_gets_other_memory(
    memory: GpuMemory, virtual_memory: FakeVirtualMemory, other: subprocess.Popen[str]
) -> None:
    """An engine that still maps a unit that was given up keeps its bytes."""
    first, second = unit("first", 0, 1), unit("second", 0, 1)
    write(memory, first, b"first")
    engine = FakeVirtualMemory(0)
    descriptor = memory.export(first, other.pid)
    seen = MappedRange(engine, 0, 2 * PAGE_BYTES)
    seen.map_descriptor(0, 2 * PAGE_BYTES, descriptor)
    os.close(descriptor)
    write(memory, second, b"other")
    assert ctypes.string_at(seen.address + 3, 5) == b"first"
    assert read(memory, second, 5) == b"other"
    assert virtual_memory.free_bytes(0) == 0, "both have memory"
    seen.close()
    assert virtual_memory.free_bytes(0) == 2 * PAGE_BYTES


def test_allocations_never_have_more_than_the_pages(memory: GpuMemory, virtual_memory: FakeVirtualMemory) -> None:
    write(memory, unit("a", 0, 1), b"a")
    write(memory, unit("b", 2, 3), b"b")
    write(memory, unit("c", 1, 2), b"c")
    assert memory.allocated_bytes() == 2 * PAGE_BYTES, "both units that had one of the pages were given up"
    assert memory.free([0]) == 0
    assert memory.free([1]) == 2 * PAGE_BYTES
    assert virtual_memory.free_bytes(0) == PAGES * PAGE_BYTES


def test_pages_are_mapped_by_a_process_until_it_has_exited(memory: GpuMemory, other: subprocess.Popen[str]) -> None:
    stored = unit("u", 2, 1)
    write(memory, stored, b"u")
    write(memory, unit("v", 0), b"v")
    assert memory.mapped_by_others() == {}
    os.close(memory.export(stored, other.pid))
    assert memory.mapped_by_others() == {1: [other.pid], 2: [other.pid]}
    assert memory.mapped_among([0, 1, 3]) == {1}
    other.kill()
    other.wait()
    assert memory.mapped_by_others() == {}
    assert memory.mapped_among([0, 1, 3]) == set()
    with pytest.raises(EngineFailed, match="has exited"):
        memory.export(stored, other.pid)


def test_memory_that_others_have_taken_is_an_error_of_the_load(memory: GpuMemory, virtual_memory: FakeVirtualMemory) -> None:
    taken = virtual_memory.create(0, PAGES * PAGE_BYTES)
    with pytest.raises(InsufficientMemory, match="cuMemCreate"):
        write(memory, unit("u", 0), b"u")
    virtual_memory.release(taken)
    write(memory, unit("u", 0), b"u")


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 0), (PAGE_BYTES - 6, 2)])
def test_a_copy_beyond_a_unit_is_refused(memory: GpuMemory, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="are outside a unit"):
        memory.write(unit("u", 0), offset, 0, nbytes)


def test_unwritten_unit_has_no_memory(memory: GpuMemory) -> None:
    write(memory, unit("u", 0, 1), b"u")
    with pytest.raises(DeviceFailed, match="no memory of unit v"):
        read(memory, unit("v", 0), 1)


def test_devices_that_cannot_export_pages_are_refused(driver: FakeDriver) -> None:
    for vm, reason in (
        (FakeVirtualMemory(devices=0), "file descriptor"),
        (FakeVirtualMemory(granularity_bytes=2 * PAGE_BYTES), "by"),
    ):
        with pytest.raises(DeviceFailed, match=f"cuda:0 .*{reason}.* Use arenas"):
            GpuMemory(driver, vm, 0, Pins(driver))


def test_broken_context_does_not_stop_the_close(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GpuMemory(driver, FakeVirtualMemory(), 0, Pins(driver))

    def broken(_: object) -> None:
        raise DeviceFailed("cudaStreamDestroy: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "destroy_stream", broken)
        memory.close()
    driver.destroy_stream(memory._stream)


def test_a_range_is_mapped_once_and_inside(virtual_memory: FakeVirtualMemory) -> None:
    found, allocation = MappedRange(virtual_memory, 0, 2 * PAGE_BYTES), virtual_memory.create(0, PAGE_BYTES)
    with pytest.raises(DeviceFailed, match="outside a range"):
        found.map(2 * PAGE_BYTES, PAGE_BYTES, allocation, writable=True)
    found.map(PAGE_BYTES, PAGE_BYTES, allocation, writable=True)
    with pytest.raises(DeviceFailed, match="mapped there already"):
        found.map(PAGE_BYTES, PAGE_BYTES, allocation, writable=True)
    found.close()
    found.close()
    assert (virtual_memory.mappings, virtual_memory.reservations) == ({}, {})
    virtual_memory.release(allocation)


def test_mapping_without_access_is_undone(virtual_memory: FakeVirtualMemory) -> None:
    found, allocation = MappedRange(virtual_memory, 7, PAGE_BYTES), virtual_memory.create(0, PAGE_BYTES)
    with pytest.raises(DeviceFailed, match="cuMemSetAccess"):
        found.map(0, PAGE_BYTES, allocation, writable=True)
    assert virtual_memory.mappings == {}
    found.close()
    virtual_memory.release(allocation)


def test_receivers_forget_what_is_gone(other: subprocess.Popen[str]) -> None:
    receivers: Receivers[str] = Receivers()
    receivers.add(other.pid, "a")
    receivers.add(other.pid, "b")
    receivers.forget({"a"})
    assert (receivers.list_processes("a"), receivers.list_processes("b")) == ([], [other.pid])
    receivers.close()
    assert receivers.list_processes("b") == []


def test_giving_units_up_takes_the_cheapest_and_no_more_than_there_are() -> None:
    store = Store.empty(PAGES)
    for n, key in enumerate(("a", "b", "c")):
        found = reserve(store, key, "m", [Unit(key, n * PAGE_BYTES, PAGE_BYTES)], 0.0, lambda _: 0.0)
        assert found is not None
        store, _ = release(complete(found.store, [key]), key, 1.0)
    costs = {"a": 3.0, "b": 1.0, "c": 2.0}
    left, units = give_up(store, 1, lambda u: costs[u.key])
    assert (units, audit(left)) == (("b",), [])
    left, units = give_up(store, 9, lambda u: costs[u.key], lambda u: u.key == "c")
    assert (units, left.reusable_pages, audit(left)) == (("b", "a"), 1, [])
