"""The memory of a device that units are copied into, and that engines map (ADR 0054).

`PageMemory` is that of a separate cpu device, `gpu_memory.GpuMemory` that of a GPU.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from shared.contracts.segment import Extent
from shared.mapping import coalesce
from weights.pool.memory import Hook, PoolMemory
from weights.store.pages import StoredUnit
from weights.store.units import PAGE_BYTES

log = logging.getLogger(__name__)


class UnitMemory(Protocol):
    """Memory of units in numbered pages. Methods may be called from several threads, for different
    pages.

    Attributes:
        has_runs: Engines map neighbouring pages together.
    """

    has_runs: bool

    def bind(self, node: int) -> bool:
        """Take the memory from this NUMA node. Returns True if it is there."""
        ...

    def write(self, unit: StoredUnit, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from host memory at `address` to `offset` in the unit, and wait."""
        ...

    def views(self, unit: StoredUnit, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range of the unit, in pieces. Each is valid until the next."""
        ...

    def copy_unit(self, unit: StoredUnit, source: UnitMemory, from_unit: StoredUnit) -> None:
        """Copy a whole unit from another device's memory, and wait."""
        ...

    def free(self, pages: Iterable[int]) -> int:
        """Free the memory of pages that are in no unit. Returns the number of freed bytes."""
        ...

    def claim(self, pages: Sequence[int], pid: int | None) -> None:
        """Count lent pages as mapped by a process, where mappings cannot be seen.

        Raises:
            EngineFailed: Mappings cannot be seen, and there is no such process.
        """
        ...

    def unclaim(self, pages: Sequence[int]) -> None:
        """End the claims to pages that their borrower has returned."""
        ...

    def mapped_among(self, pages: Iterable[int]) -> frozenset[int]:
        """Return those of the pages that other processes map."""
        ...

    def mapped_by_others(self, mappings: Mapping[int, bytes] | None = None) -> dict[int, list[int]]:
        """Return the pages that other processes map, and these processes.

        Args:
            mappings: What `read_mappings` has just returned; None: they may be read now.
        """
        ...

    def close(self, *, unlink: bool = False) -> None:
        """Close the memory.

        Args:
            unlink: No process maps it.
        """
        ...


def copy_by_host(memory: UnitMemory, unit: StoredUnit, source: UnitMemory, from_unit: StoredUnit) -> None:
    """Copy a whole unit between two memories, through addresses of this process."""
    offset = 0
    for view in source.views(from_unit, 0, from_unit.nbytes):
        memory.write(unit, offset, ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
        offset += len(view)


class PageMemory:
    """Pages of one file of shared memory, each without memory until it is first written.

    Methods may be called from several threads, for different pages.
    """

    has_runs = True

    def __init__(self, name: str | None, count: int, *, keep: bool = False, on_populated: Hook | None = None) -> None:
        """Create a file of `count` pages.

        Args:
            name: Name of the file under /dev/shm; None: without a name, removed with its last
                mapping.
            count: Number of pages.
            keep: Use an existing file unchanged.
            on_populated: Called with address and length of a page that was populated.
        """
        self._pool = PoolMemory(name, count * PAGE_BYTES, chunk_bytes=PAGE_BYTES, keep=keep, on_populated=on_populated)

    @property
    def fd(self) -> int:
        """Descriptor of the file, for mapping its extents."""
        return self._pool.fd

    def bind(self, node: int) -> bool:
        """Take the pages' memory from this NUMA node. Returns True if the kernel says so."""
        try:
            self._pool.bind(node)
            return self._pool.bound_to() == (node,)
        except OSError as e:
            log.warning("failed to bind memory to its NUMA node", extra={"numa_node": node, "error": str(e)})
            return False

    def write(self, unit: StoredUnit, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` from host memory at `address` to `offset` in the unit.

        Raises:
            ValueError: The range is outside the unit.
            OSError: Shared memory is full (ENOSPC).
        """
        if offset < 0 or nbytes <= 0 or offset + nbytes > unit.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a unit of {unit.nbytes} bytes")
        while nbytes:
            page, within = unit.pages[offset // PAGE_BYTES], offset % PAGE_BYTES
            length = min(nbytes, PAGE_BYTES - within)
            self._pool.populate(page * PAGE_BYTES, PAGE_BYTES)
            with self._pool.view(page * PAGE_BYTES + within, length) as view:
                ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(view)), address, length)
            offset, address, nbytes = offset + length, address + length, nbytes - length

    def views(self, unit: StoredUnit, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range of the unit, page by page."""
        while nbytes:
            page, within = unit.pages[offset // PAGE_BYTES], offset % PAGE_BYTES
            length = min(nbytes, PAGE_BYTES - within)
            with self._pool.view(page * PAGE_BYTES + within, length) as view:
                yield view
            offset, nbytes = offset + length, nbytes - length

    def copy_unit(self, unit: StoredUnit, source: UnitMemory, from_unit: StoredUnit) -> None:
        """Copy a whole unit from another device's memory."""
        copy_by_host(self, unit, source, from_unit)

    def free(self, pages: Iterable[int]) -> int:
        """Free the memory of pages that no process maps.

        Returns the number of freed bytes.
        """
        return self._pool.punch(pages)

    def allocated_bytes(self) -> int:
        """Return the bytes of memory that the file uses."""
        return self._pool.count_allocated()

    def claim(self, pages: Sequence[int], pid: int | None) -> None:
        """Do nothing: the borrower maps the pages, and locks show that."""

    def unclaim(self, pages: Sequence[int]) -> None:
        """Do nothing: the borrower has unmapped the pages, or locks show that it has not."""

    def mapped_among(self, pages: Iterable[int]) -> frozenset[int]:
        """Return those of the pages that other processes map."""
        return self._pool.mapped_among(pages)

    def mapped_by_others(self, mappings: Mapping[int, bytes] | None = None) -> dict[int, list[int]]:
        """Return the pages that other processes map, and these processes."""
        return self._pool.mapped_by_others(mappings)

    def close(self, *, unlink: bool = False) -> None:
        """Unmap the file. It keeps its contents, unless `unlink` removes it."""
        self._pool.close(unlink=unlink)


def extents_of(units: Sequence[StoredUnit]) -> tuple[Extent, ...]:
    """Return the runs of the file that an engine maps, in order, to see one unit after the other.

    Each unit begins on a page of its own (`units.AddressRange`).
    """
    pages = (Extent(offset=page * PAGE_BYTES, nbytes=PAGE_BYTES) for unit in units for page in unit.pages)
    return tuple(coalesce(list(pages)))
