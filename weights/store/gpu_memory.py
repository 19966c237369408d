"""The memory of a GPU for units: one physical allocation for each (ADR 0060).

The store's page numbers are an account here. Pages have memory while they are in an allocation,
which lives until a unit that gets one of its pages is written, or the page is lent. So all
allocations together never have more than the store's pages.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shared.errors import DeviceFailed, EngineFailed
from weights.devices.driver import CudaDriver, Stream
from weights.devices.mapped_range import MappedRange
from weights.devices.pinning import Pins
from weights.devices.virtual_memory import Allocation, VirtualMemory
from weights.store.memory import UnitMemory, copy_by_host
from weights.store.pages import StoredUnit
from weights.store.receivers import Receivers
from weights.store.units import PAGE_BYTES

_READ_BYTES = 16 * 1024 * 1024
"""Bytes that are read back from the device at once."""


@dataclass(frozen=True, eq=False)
class _Unit:
    """Memory of a unit.

    Attributes:
        filled_as: Its key while it was filled, which no other unit has.
        readers: Other devices that may read `range`.
    """

    pages: tuple[int, ...]
    filled_as: str
    allocation: Allocation
    range: MappedRange
    readers: set[int] = field(default_factory=set)


class GpuMemory:
    """`UnitMemory` on a GPU. Methods may be called from several threads, for different units."""

    has_runs = False

    def __init__(self, driver: CudaDriver, virtual_memory: VirtualMemory, index: int, pins: Pins) -> None:
        """Use the device `index`.

        Args:
            pins: Page-locked host memory.

        Raises:
            DeviceFailed: The device cannot export memory, or only in units that are no part of a
                page.
        """
        driver.use(index)
        if not virtual_memory.is_supported(index):
            raise DeviceFailed(
                f"Device cuda:{index} has no memory that can be sent to engines by file descriptor. Use arenas there"
            )
        if PAGE_BYTES % (granularity := virtual_memory.granularity(index)):
            raise DeviceFailed(
                f"Device cuda:{index} allocates by {granularity} bytes, and a page has {PAGE_BYTES}. Use arenas there"
            )
        self._driver, self._virtual_memory, self._index, self._pins = driver, virtual_memory, index, pins
        # Copies from host memory and from another device use different engines of the device.
        self._stream, self._peer_stream = driver.stream(urgent=True), driver.stream(urgent=True)
        self._lock = threading.Lock()
        self._by_page: dict[int, _Unit] = {}
        self._receivers: Receivers[_Unit] = Receivers()
        self._borrowers: Receivers[int] = Receivers()

    def bind(self, node: int) -> bool:
        """Return False: a GPU has its own memory, and no NUMA node."""
        return False

    def write(self, unit: StoredUnit, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from host memory at `address` to `offset` in the unit, and wait.

        Raises:
            ValueError: The range is outside the unit.
            DeviceFailed: The driver failed.
            InsufficientMemory: The device is full: others than the loader allocate there.
        """
        if offset < 0 or nbytes <= 0 or offset + nbytes > unit.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a unit of {unit.nbytes} bytes")
        self._driver.use(self._index)
        start = self._allocate(unit).range.address

        def issue() -> None:
            for run in self._pins.runs(offset, address, nbytes):
                self._driver.copy(start + run.offset, run.address, run.nbytes, self._stream)

        self._finish(issue, self._stream)

    def copy_unit(self, unit: StoredUnit, source: UnitMemory, from_unit: StoredUnit) -> None:
        """Copy a whole unit from another device's memory, and wait.

        Another GPU's memory is read over the link between both, where the devices have one.

        Raises:
            DeviceFailed: The driver failed, or the other device lacks the unit.
            InsufficientMemory: The device is full: others than the loader allocate there.
        """
        if not isinstance(source, GpuMemory):
            copy_by_host(self, unit, source, from_unit)
            return
        address = source.open_to(self._index, from_unit)
        self._driver.use(self._index)
        start = self._allocate(unit).range.address

        def issue() -> None:
            self._driver.copy_from_peer(start, self._index, address, source._index, from_unit.nbytes, self._peer_stream)

        self._finish(issue, self._peer_stream)

    def open_to(self, index: int, unit: StoredUnit) -> int:
        """Let another device read a unit, if it can, and return the unit's address.

        Raises:
            DeviceFailed: There is no such unit, or the driver failed.
        """
        with self._lock:
            found = self._find_locked(unit)
            if index not in found.readers and self._driver.can_access_peer(index, self._index):
                self._driver.use(self._index)
                found.range.share(index)
                found.readers.add(index)
            return found.range.address

    def _finish(self, issue: Callable[[], None], stream: Stream) -> None:
        """Issue copies, and wait for them, also for those that were issued before an error."""
        try:
            issue()
        except BaseException:
            with suppress(DeviceFailed):
                self._driver.wait(self._driver.record(stream))
            raise
        self._driver.wait(self._driver.record(stream))

    def views(self, unit: StoredUnit, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range of the unit, which are read back from the device."""
        start, buffer = self._find(unit).range.address, bytearray(min(nbytes, _READ_BYTES))
        into = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        while nbytes:
            length = min(nbytes, _READ_BYTES)
            self._driver.use(self._index)
            self._driver.copy_back(into, start + offset, length)
            yield memoryview(buffer)[:length]
            offset, nbytes = offset + length, nbytes - length

    def export(self, unit: StoredUnit, pid: int) -> int:
        """Return a new descriptor of the unit's memory for a process. The caller closes it.

        From now on the unit's pages count as mapped until the process has exited.

        Raises:
            EngineFailed: There is no such process.
        """
        with self._lock:
            found = self._find_locked(unit)
            try:
                self._receivers.add(pid, found)
            except ProcessLookupError as e:
                raise EngineFailed(f"Process {pid} has exited, or is in another PID namespace; share it with the loader") from e
            self._driver.use(self._index)
            return self._virtual_memory.export_descriptor(found.allocation)

    def free(self, pages: Iterable[int]) -> int:
        """Free the memory of given-up units that had one of the pages.

        Returns:
            The number of freed bytes.
        """
        self._driver.use(self._index)
        with self._lock:
            return self._drop(frozenset(pages))

    def allocated_bytes(self) -> int:
        """Return the bytes of all allocations."""
        with self._lock:
            return len(self._by_page) * PAGE_BYTES

    def claim(self, pages: Sequence[int], pid: int | None) -> None:
        """Count lent pages as mapped by a process until `unclaim`, or its exit.

        The process allocates the memory of these pages itself (ADR 0107).

        Raises:
            EngineFailed: There is no such process, or it is not visible.
        """
        with self._lock:
            try:
                if pid is None:
                    raise ProcessLookupError
                self._borrowers.add(pid, *pages)
            except ProcessLookupError as e:
                raise EngineFailed(f"Process {pid} has exited, or is in another PID namespace; share it with the loader") from e

    def unclaim(self, pages: Sequence[int]) -> None:
        """End the claims to pages that their borrower has returned."""
        with self._lock:
            self._borrowers.forget(frozenset(pages))

    def mapped_among(self, pages: Iterable[int]) -> frozenset[int]:
        """Return those of the pages that other processes may map."""
        wanted = frozenset(pages)
        with self._lock:
            units = {self._by_page[page] for page in wanted if page in self._by_page}
            mapped = frozenset(page for unit in units if self._receivers.list_processes(unit) for page in unit.pages)
            return (mapped & wanted) | (self._borrowers.mappers().keys() & wanted)

    def mapped_by_others(self, mappings: Mapping[int, bytes] | None = None) -> dict[int, list[int]]:
        """Return the pages that other processes may map, and these processes."""
        with self._lock:
            mappers = {unit: self._receivers.list_processes(unit) for unit in set(self._by_page.values())}
            return {page: pids for unit, pids in mappers.items() if pids for page in unit.pages} | self._borrowers.mappers()

    def close(self, *, unlink: bool = False) -> None:
        """Free all memory, whatever `unlink` says. Engines keep what they map."""
        with self._lock, suppress(DeviceFailed):  # what a broken context keeps goes with the process
            self._receivers.close()
            self._borrowers.close()
            self._driver.use(self._index)
            self._drop(frozenset(self._by_page))
            for stream in (self._stream, self._peer_stream):
                self._driver.destroy_stream(stream)

    def _allocate(self, unit: StoredUnit) -> _Unit:
        """Return the memory of a unit that is being filled, allocated if it has none yet."""
        with self._lock:
            found = self._by_page.get(unit.pages[0])
            if found is not None and (found.filled_as, found.pages) == (unit.key, unit.pages):
                return found
            self._drop(frozenset(unit.pages))
            nbytes = len(unit.pages) * PAGE_BYTES
            allocation = self._virtual_memory.create(self._index, nbytes)
            try:
                found = _Unit(unit.pages, unit.key, allocation, self._map(allocation, nbytes))
            except BaseException:
                self._virtual_memory.release(allocation)
                raise
            self._by_page |= dict.fromkeys(unit.pages, found)
            return found

    def _map(self, allocation: Allocation, nbytes: int) -> MappedRange:
        """Map an allocation for the loader's copies."""
        found = MappedRange(self._virtual_memory, self._index, nbytes)
        try:
            found.map(0, nbytes, allocation, writable=True)
        except BaseException:
            found.close()
            raise
        return found

    def _find(self, unit: StoredUnit) -> _Unit:
        with self._lock:
            return self._find_locked(unit)

    def _find_locked(self, unit: StoredUnit) -> _Unit:
        found = self._by_page.get(unit.pages[0])
        if found is None or found.pages != unit.pages:
            raise DeviceFailed(f"Device cuda:{self._index} has no memory of unit {unit.key}")
        return found

    def _drop(self, pages: Collection[int]) -> int:
        """Free the allocations that have one of the pages. Engines that map one keep its memory."""
        dropped = {found for page in pages if (found := self._by_page.get(page)) is not None}
        for unit in dropped:
            for page in unit.pages:
                del self._by_page[page]
            unit.range.close()
            self._virtual_memory.release(unit.allocation)
        self._receivers.forget(dropped)
        return sum(len(unit.pages) for unit in dropped) * PAGE_BYTES
