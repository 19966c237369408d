"""Copy units from another device of the node (Torpor section 4.3, ADR 0058).

The other device keeps the units from being reclaimed during the copy; its engines continue to read
them. The first free link copies a unit: the link from host memory, once the unit's bytes are in
host memory, or the link from the other device. Both links copy units in execution order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from shared.errors import DeviceMissing
from weights.devices.pacing import Pacer
from weights.store.arena import PagedArena
from weights.store.checking import SAMPLE_BYTES, key_on_device
from weights.store.copying import Target, update_rate
from weights.store.memory import UnitMemory
from weights.store.missing import Missing
from weights.store.pages import StoredUnit
from weights.store.units import Unit

log = logging.getLogger(__name__)
TYPICAL_BYTES_PER_SECOND = 5e9
"""Assumed bandwidth of a link without a pace and without a measurement."""


class Peer(Protocol):
    """Another device of the node, as the source of copies."""

    @property
    def memory(self) -> UnitMemory: ...

    def hold(self, holder: str, units: Iterable[Unit]) -> Mapping[str, StoredUnit]:
        """Keep those of the units that are on the device from being reclaimed until `unhold`."""
        ...

    def unhold(self, holder: str) -> None: ...
    def has_any(self, units: Iterable[Unit]) -> bool: ...

    def complete_units(self) -> Mapping[str, int]:
        """Return the sizes in bytes of the complete units with known content, by key."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Keep the memory mapped meanwhile. Raises `DeviceMissing` if the device is closed."""
        ...


@dataclass(frozen=True)
class PeerLink:
    """A link from another device to this one.

    Attributes:
        bytes_per_second: Its pace, or its measured bandwidth; None: neither is known.
        queued_bytes: Bytes of units that wait for the link.
        loads: Number of arenas with such units.
        copied_bytes: Bytes of all copies over the link.
    """

    peer: str
    bytes_per_second: float | None
    is_paced: bool
    queued_bytes: int
    loads: int
    copied_bytes: int


def split(units: Iterable[tuple[int, int, float]], host_rate: float, host_bytes: int = 0) -> set[int]:
    """Return the units to copy from host memory, so that both links end at about the same time.

    Each unit goes to the link that finishes it sooner.

    Args:
        units: Index, bytes, and bytes per second from the other device of each unit, in execution
            order. One thread copies from all other devices, one unit after the other.
        host_rate: Bytes per second through host memory, reading included.
        host_bytes: Bytes of further units, which no other device has.
    """
    peer_s, host_s = 0.0, host_bytes / host_rate
    host = set()
    for index, nbytes, peer_rate in units:
        if host_s + nbytes / host_rate < peer_s + nbytes / peer_rate:
            host_s += nbytes / host_rate
            host.add(index)
        else:
            peer_s += nbytes / peer_rate
    return host


class PeerThread:
    """Copies units from other devices into one device's pages."""

    def __init__(
        self,
        target: Target,
        memory: UnitMemory,
        arenas: Mapping[str, PagedArena],
        pacers: Mapping[str, Pacer],
        *,
        verify: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the thread's state; `connect` starts it.

        Args:
            target: The device that the units are copied to.
            memory: Its pages.
            arenas: Its open arenas by holder, guarded by the device's lock.
            pacers: Paces of the links, by device.
            verify: Check the hash of every copied unit; otherwise of a sample of each arena.
            clock: Monotonic seconds.
        """
        self._target, self._memory, self._arenas, self._pacers = target, memory, arenas, pacers
        self._verify, self._clock = verify, clock
        self.peers: Mapping[str, Peer] = {}
        self._rates: dict[str, float] = {}
        self._copied_bytes: Counter[str] = Counter()
        self._holding: set[PagedArena] = set()
        self._closing = False
        self._thread: threading.Thread | None = None

    def connect(self, peers: Mapping[str, Peer]) -> None:
        """Copy from these devices from now on, which include those of earlier calls."""
        with self._target.changed:
            if self._closing:
                return
            self.peers = peers
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"peer-{self._target.device_id}", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread. No arena is open any more."""
        with self._target.changed:
            self._closing = True
            self._target.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def rate_of(self, peer: str) -> float | None:
        """Return the pace of copies from a device, or their measured bytes per second."""
        return self._pacers[peer].bytes_per_second if peer in self._pacers else self._rates.get(peer)

    def _fastest_first(self) -> list[tuple[str, float]]:
        rates = [(name, self.rate_of(name) or TYPICAL_BYTES_PER_SECOND) for name in self.peers]
        return sorted(rates, key=lambda found: -found[1])

    def find(self, arena: PagedArena, host_rate: float) -> None:
        """Find the missing units of a new arena on other devices, and keep them there."""
        wanted = {i: m.unit for i, m in arena.missing.items() if m.unit.key.startswith("sha256:")}
        found: dict[int, tuple[str, float, StoredUnit]] = {}
        for name, rate in self._fastest_first():
            left = {i: unit for i, unit in wanted.items() if i not in found}
            there = self.peers[name].hold(self._holder(arena), left.values()) if left else {}
            found |= {i: (name, rate, there[unit.key]) for i, unit in left.items() if unit.key in there}
        ordered = sorted(found, key=lambda i: (arena.missing[i].rank, i))
        alone = sum(m.unit.nbytes for i, m in arena.missing.items() if i not in found)
        from_host = split([(i, wanted[i].nbytes, found[i][1]) for i in ordered], host_rate, alone)
        with self._target.changed:
            for index, (name, _, source) in found.items():
                missing = arena.missing[index]
                missing.peer, missing.source = name, source
                missing.reads_host = index in from_host
            if found:
                self._holding.add(arena)
            self._target.changed.notify_all()

    def complete_units(self) -> list[tuple[str, Mapping[str, int]]]:
        """Return the units of all other devices, those with the fastest link first.

        The target's lock is not held.
        """
        return [(name, self.peers[name].complete_units()) for name, _ in self._fastest_first()]

    def links(self) -> list[PeerLink]:
        """Return the links that are in use, or whose bandwidth is known.

        The target's lock is held.
        """
        waiting = [[m for m in a.missing.values() if m.peer is not None] for a in self._arenas.values()]
        found = []
        for name in self.peers:
            queued = [sum(m.unit.nbytes for m in missing if m.peer == name) for missing in waiting]
            link = PeerLink(
                name,
                self.rate_of(name),
                name in self._pacers,
                queued_bytes=sum(queued),
                loads=sum(n > 0 for n in queued),
                copied_bytes=self._copied_bytes[name],
            )
            if link.bytes_per_second is not None or link.queued_bytes:
                found.append(link)
        return found

    def have_any(self, units: Sequence[Unit]) -> bool:
        """True if another device has one of the units. The target's lock is not held."""
        return any(peer.has_any(units) for peer in self.peers.values())

    def forget(self, arena: PagedArena) -> None:
        """Release the units on other devices for an arena. The target's lock is not held."""
        with self._target.changed:
            self._holding.discard(arena)
        for peer in self.peers.values():
            peer.unhold(self._holder(arena))

    def _holder(self, arena: PagedArena) -> str:
        return f"peer-{self._target.device_id}-{arena.holder}"

    def _run(self) -> None:
        changed = self._target.changed
        while True:
            with changed:
                while not (copied := self._find_copied()) and (found := self._choose()) is None:
                    if self._closing:
                        return
                    changed.wait()
                if not copied and found is not None:
                    found[2].is_under_way = True
                    found[0].under_way += 1
            if copied:
                for arena in copied:
                    self.forget(arena)
            elif found is not None:
                self._copy_unit(*found)

    def _copy_unit(self, arena: PagedArena, index: int, missing: Missing) -> None:
        is_copied = False
        try:
            is_copied = self._copy(arena, index, missing)
        except Exception:  # the thread's boundary: the unit is copied from host memory instead
            log.exception("failed to copy a unit from another device", extra={"device": self._target.device_id})
        with self._target.changed:
            arena.under_way -= 1
            if not is_copied and index in arena.missing:
                arena.without_peer(index)
            self._target.changed.notify_all()

    def _find_copied(self) -> list[PagedArena]:
        """Return arenas that hold units on other devices and need none of them any more.

        Either link may have copied the last unit.
        """
        return [a for a in self._holding if all(m.peer is None for m in a.missing.values())]

    def _choose(self) -> tuple[PagedArena, int, Missing] | None:
        found = [
            (a.priority, int(a.holder.removeprefix("arena-")), m.rank, i)
            for a in self._arenas.values()
            if a.is_open and a.error is None
            for i, m in a.missing.items()
            if m.peer is not None and not m.is_under_way
        ]
        if not found:
            return None
        _, number, _, index = min(found)
        arena = self._arenas[f"arena-{number}"]
        return arena, index, arena.missing[index]

    def _copy(self, arena: PagedArena, index: int, missing: Missing) -> bool:
        """Copy the unit; return False if its source is gone or has other bytes."""
        began, target, key = self._clock(), self._target, missing.unit.key
        peer, source = self.peers[missing.peer or ""], missing.source
        with target.changed:
            if target.find_unit(key) is not None:  # another arena has loaded it meanwhile
                target.settle(arena, index, key, {}, copied_bytes=0)
                return True
            stored = target.find_unit(missing.key)
        if source is None or stored is None:
            return False
        try:
            with peer.reading():
                self._memory.copy_unit(stored, peer.memory, source)
        except DeviceMissing:
            return False
        is_checked = self._verify or arena.peer_bytes < SAMPLE_BYTES
        if is_checked and key_on_device(self._memory, stored, missing.unit, missing.tensors) != key:
            log.error("the bytes of a unit on another device have changed; it is copied from host memory", extra={"unit": key})
            with target.changed:
                target.count_changed()
            return False
        if (pacer := self._pacers.get(missing.peer or "")) is not None:
            until = pacer.book(missing.unit.nbytes, began)
            with target.changed:
                while arena.is_open and (left := until - self._clock()) > 0:
                    target.changed.wait(left)
        name, rate = missing.peer or "", missing.unit.nbytes / max(self._clock() - began, 1e-9)
        self._copied_bytes[name] += missing.unit.nbytes
        self._rates[name] = update_rate(self._rates.get(name), rate)
        with target.changed:
            arena.peer_bytes += missing.unit.nbytes
            target.settle(arena, index, key, {}, copied_bytes=missing.unit.nbytes, is_from_peer=True)
        return True
