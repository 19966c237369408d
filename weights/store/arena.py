"""One segment on a separate device: its units, and which of them still lack bytes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Collection, Sequence
from heapq import heappush
from typing import Protocol

from shared.contracts.segment import GpuUnitsHandle, MappedUnit, PagesHandle, PagesLayout, UnitPages
from shared.errors import ThawError
from weights.devices.cpu import check_range, wait_for
from weights.devices.curve import FALLBACK_BYTES
from weights.devices.grouping import Ranges
from weights.devices.port import Place, Priority
from weights.formats.execution_order import Rank
from weights.store.missing import Missing
from weights.store.units import Unit, address_range


class ArenaOwner(Protocol):
    """The device of an arena.

    Attributes:
        changed: Guards all fields of its arenas.
    """

    @property
    def changed(self) -> threading.Condition: ...

    @property
    def device_id(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def bus_id(self) -> str | None: ...
    @property
    def lends_kv(self) -> bool: ...

    def handle_of(self, arena: PagedArena) -> PagesHandle | GpuUnitsHandle: ...
    def pages_of(self, arena: PagedArena, indexes: Sequence[int]) -> tuple[UnitPages, ...]: ...
    def remove(self, arena: PagedArena) -> None: ...


class PagedArena:
    """The units of one segment. All its fields are guarded by the device's lock.

    Attributes:
        keys: Key of each unit in the store; a private key while its bytes are missing.
        missing: Units without bytes on the device, by index.
        ready: Missing units whose bytes are all in host memory, by execution order.
        here: Units on the device, in the order of their completion.
        group_bytes: The arena reports units in groups of this many bytes, or smaller ones if no
            unit waits to be copied (Torpor, section 4.3).
        under_way: Number of units that are being copied.
    """

    def __init__(self, device: ArenaOwner, holder: str, place: Place, priority: Priority, units: Sequence[Unit]) -> None:
        self._device, self.holder, self.place, self.priority = device, holder, place, priority
        self.units = tuple(units)
        self.keys = [u.key for u in units]
        self.missing: dict[int, Missing] = {}
        self.ready: list[tuple[Rank, int]] = []
        self.here: list[int] = []
        self.group_bytes = FALLBACK_BYTES
        self._group: list[int] = []
        self.under_way = 0
        self.is_open = True
        self.error: ThawError | None = None
        self.copied_bytes = self.reused_bytes = self.peer_bytes = 0
        self.digests: dict[str, str] = {}
        self._starts = [u.offset for u in units]
        self._taken = Ranges()

    @property
    def nbytes(self) -> int:
        return self.place.nbytes

    @property
    def watermark(self) -> int:
        with self._device.changed:
            return self._watermark()

    def _watermark(self) -> int:
        return min((m.unit.offset for m in self.missing.values()), default=self.place.nbytes)

    def fill(self, offset: int, address: int, nbytes: int) -> None:
        check_range(self.place, offset, nbytes)
        with self._device.changed:
            if self.error is not None:
                raise self.error
            if not self.is_open:
                return
            if not self._taken.take(offset, offset + nbytes):
                raise ValueError(f"bytes {offset} to {offset + nbytes} overlap bytes that this arena has received")
            for index in range(max(0, bisect_right(self._starts, offset) - 1), len(self.units)):
                if self.units[index].offset >= offset + nbytes:
                    break
                self._add_bytes(index, offset, address, nbytes)
            self._device.changed.notify_all()

    def _add_bytes(self, index: int, offset: int, address: int, nbytes: int) -> None:
        missing = self.missing.get(index)
        if missing is None:
            return
        start, end = max(offset, missing.unit.offset), min(offset + nbytes, missing.unit.end)
        if start < end:
            missing.pieces.append((start, address + start - offset, end - start))
            missing.arrived += end - start
            if missing.arrived == missing.unit.nbytes:
                heappush(self.ready, (missing.rank, index))

    def report(self, index: int) -> None:
        """Report a unit that is now on the device. The caller has removed it from `missing`."""
        self._group.append(index)
        # A unit that a peer has copied, or copies now, may still be in `ready`.
        has_waiting = any(i in self.missing and not self.missing[i].is_under_way for _, i in self.ready)
        if not has_waiting or sum(self.units[i].nbytes for i in self._group) >= self.group_bytes:
            self.here += self._group
            self._group = []

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        def is_done() -> bool:
            if self.error is not None:
                raise self.error
            return self.is_open and self._watermark() >= until

        return wait_for(self._device.changed, is_done, lambda: not self.is_open, cancelled)

    def wait_units(self, after: int) -> tuple[UnitPages, ...]:
        """Block until more than `after` units are on the device.

        Returns:
            The pages of the units from the `after`-th on; none if all units are on the device or
            the arena was released.

        Raises:
            DeviceFailed: The device has failed.
        """

        def is_done() -> bool:
            if self.error is not None:
                raise self.error
            return self.is_open and (len(self.here) > after or not self.missing)

        with self._device.changed:
            wait_for(self._device.changed, is_done, lambda: not self.is_open, None)
            return self._device.pages_of(self, self.here[after:]) if self.is_open else ()

    def layout(self) -> PagesLayout:
        """Return the address range that an engine maps the units into."""
        places = address_range(self.units)
        units = tuple(
            MappedUnit(offset=u.offset, nbytes=u.nbytes, start=start) for u, start in zip(self.units, places.starts, strict=True)
        )
        device = self._device
        return PagesLayout(
            device=device.device_id,
            nbytes=places.nbytes,
            file=device.file,
            units=units,
            bus_id=device.bus_id,
            lends_kv=device.lends_kv,
        )

    def handle(self) -> PagesHandle | GpuUnitsHandle | None:
        with self._device.changed:
            return self._device.handle_of(self) if self.is_open and not self.missing else None

    def find_missing(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the segment that host memory has to provide: first byte and end."""
        with self._device.changed:
            return self._find_missing()

    def _find_missing(self) -> tuple[tuple[int, int], ...]:
        return tuple((m.unit.offset, m.unit.end) for m in self.missing.values() if m.reads_host)

    def wait_for_missing(self, seen: Collection[tuple[int, int]], cancelled: threading.Event) -> tuple[tuple[int, int], ...]:
        """Wait for ranges to read that are not in `seen`.

        A unit becomes missing again if it cannot be copied from another device.

        Returns:
            The ranges. There are none if every unit is being copied or is on the device, or if the
            arena failed or was released.
        """

        def find_new() -> tuple[tuple[int, int], ...]:
            return tuple(r for r in self._find_missing() if r not in seen)

        def is_over() -> bool:
            return bool(find_new()) or self.error is not None or all(m.peer is None for m in self.missing.values())

        with self._device.changed:
            wait_for(self._device.changed, is_over, lambda: not self.is_open, cancelled)
            return find_new() if self.is_open and self.error is None else ()

    def without_peer(self, index: int) -> None:
        """Take a unit from host memory instead of another device. The device's lock is held."""
        missing = self.missing[index]
        missing.peer, missing.source, missing.reads_host, missing.is_under_way = None, None, True, False
        if missing.arrived == missing.unit.nbytes:
            heappush(self.ready, (missing.rank, index))

    def raise_priority(self, priority: Priority) -> None:
        with self._device.changed:
            self.priority = priority

    def release(self) -> int:
        """Release the units. They stay for reuse, so the number of freed bytes is 0."""
        self._device.remove(self)
        return 0
