"""Copy units from another device of the node that has them (Torpor section 4.3, ADR 0058).

The other device holds the units for the arena that copies them, so that they are not reclaimed;
engines there continue to read them. A unit is copied by the first link that is free for it: the one
from host memory, once its bytes are there, or the one from the other device. Both take units in
execution order.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from shared.errors import DeviceMissing
from weights.devices.pacing import Pacer
from weights.store.arena import PagedArena
from weights.store.checking import SAMPLE_BYTES, key_on_device
from weights.store.copying import Target
from weights.store.memory import PageMemory
from weights.store.missing import Missing
from weights.store.pages import StoredUnit
from weights.store.units import Unit

log = logging.getLogger(__name__)
TYPICAL_BYTES_PER_SECOND = 5e9
"""Of a link that has neither a pace nor a measured bandwidth."""


class Peer(Protocol):
    """Another device of the node, as the source of copies."""

    @property
    def memory(self) -> PageMemory: ...

    def hold(self, holder: str, units: Iterable[Unit]) -> Mapping[str, StoredUnit]:
        """Hold those of the units that are here, until `unhold`."""
        ...

    def unhold(self, holder: str) -> None: ...
    def has_any(self, units: Iterable[Unit]) -> bool: ...

    def reading(self) -> AbstractContextManager[None]:
        """Keep the memory mapped meanwhile. Raises `DeviceMissing` if the device is closed."""
        ...


def split(units: Iterable[tuple[int, int]], peer_rate: float, host_rate: float) -> set[int]:
    """Return the units that are to come from host memory: each link takes what it finishes sooner.

    Args:
        units: Index and bytes of each, in execution order.
        peer_rate: Bytes per second from the other device.
        host_rate: Bytes per second by way of host memory, reading included.
    """
    peer_s = host_s = 0.0
    host = set()
    for index, nbytes in units:
        if host_s + nbytes / host_rate < peer_s + nbytes / peer_rate:
            host_s += nbytes / host_rate
            host.add(index)
        else:
            peer_s += nbytes / peer_rate
    return host


class PeerThread:
    """Copies units from other devices into one device's pages.

    Attributes:
        rates: Bytes per second of the latest copies, by device.
    """

    def __init__(
        self,
        target: Target,
        memory: PageMemory,
        arenas: Mapping[str, PagedArena],
        pacers: Mapping[str, Pacer],
        *,
        verify: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pacers`: by device. `verify`: hash every copied unit, otherwise some of each arena."""
        self._target, self._memory, self._arenas, self._pacers = target, memory, arenas, pacers
        self._verify, self._clock = verify, clock
        self.peers: Mapping[str, Peer] = {}
        self.rates: dict[str, float] = {}
        self._closing = False
        self._thread: threading.Thread | None = None

    def connect(self, peers: Mapping[str, Peer]) -> None:
        """Copy from these devices from now on."""
        self.peers = peers
        self._thread = threading.Thread(target=self._run, name=f"peer-{self._target.device_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. No arena is open any more."""
        with self._target.changed:
            self._closing = True
            self._target.changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def find(self, arena: PagedArena, host_rate: float) -> None:
        """Find the missing units of a new arena on other devices, and hold them there."""
        wanted = {i: m.unit for i, m in arena.missing.items() if m.unit.key.startswith("sha256:")}
        for name, peer in self.peers.items() if wanted else ():
            there = peer.hold(self._holder(arena), wanted.values())
            mine = {i for i, unit in wanted.items() if unit.key in there}
            ordered = sorted(mine, key=lambda i: (arena.missing[i].rank, i))
            rate = self._pacers[name].bytes_per_second if name in self._pacers else self.rates.get(name, TYPICAL_BYTES_PER_SECOND)
            from_host = split([(i, wanted[i].nbytes) for i in ordered], rate, host_rate)
            with self._target.changed:
                for index in mine:
                    missing = arena.missing[index]
                    missing.peer, missing.source = name, there[wanted[index].key]
                    missing.reads_host = index in from_host
                self._target.changed.notify_all()
            wanted = {i: u for i, u in wanted.items() if i not in mine}

    def have_any(self, units: Sequence[Unit]) -> bool:
        """True if another device has one of the units. The target's lock is not held."""
        return any(peer.has_any(units) for peer in self.peers.values())

    def forget(self, arena: PagedArena) -> None:
        """Release what other devices hold for an arena. The target's lock is not held."""
        for peer in self.peers.values():
            peer.unhold(self._holder(arena))

    def _holder(self, arena: PagedArena) -> str:
        return f"peer-{self._target.device_id}-{arena.holder}"

    def _run(self) -> None:
        changed = self._target.changed
        while True:
            with changed:
                while (found := self._next()) is None:
                    if self._closing:
                        return
                    changed.wait()
                arena, index, missing = found
                missing.is_under_way = True
                arena.under_way += 1
            is_copied = False
            try:
                is_copied = self._copy(arena, index, missing)
            except Exception:  # the thread's boundary: the unit is copied from host memory instead
                log.exception("failed to copy a unit from another device", extra={"device": self._target.device_id})
            with changed:
                arena.under_way -= 1
                if not is_copied and index in arena.missing:
                    arena.without_peer(index)
                done = not any(m.peer is not None for m in arena.missing.values())
                changed.notify_all()
            if done:
                self.forget(arena)

    def _next(self) -> tuple[PagedArena, int, Missing] | None:
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
        """Copy the unit; False if its source is gone or has other bytes."""
        began, target, key = self._clock(), self._target, missing.unit.key
        peer, source = self.peers[missing.peer or ""], missing.source
        with target.changed:
            if target.stored(key) is not None:  # another arena has brought it meanwhile
                target.settle(arena, index, key, {}, copied_bytes=0)
                return True
            stored = target.stored(missing.key)
        if source is None or stored is None:
            return False
        try:
            with peer.reading():
                offset = 0
                for view in peer.memory.views(source, 0, source.nbytes):
                    self._memory.write(stored, offset, ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
                    offset += len(view)
        except DeviceMissing:
            return False
        is_checked = self._verify or arena.peer_bytes < SAMPLE_BYTES
        if is_checked and key_on_device(self._memory, stored, missing.unit, missing.tensors) != key:
            log.error("the bytes of a unit on another device have changed; it is copied from host memory", extra={"unit": key})
            return False
        if (pacer := self._pacers.get(missing.peer or "")) is not None:
            until = pacer.book(missing.unit.nbytes, began)
            with target.changed:
                while arena.is_open and (left := until - self._clock()) > 0:
                    target.changed.wait(left)
        self.rates[missing.peer or ""] = missing.unit.nbytes / max(self._clock() - began, 1e-9)
        with target.changed:
            arena.peer_bytes += missing.unit.nbytes
            target.settle(arena, index, key, {}, copied_bytes=missing.unit.nbytes, is_from_peer=True)
        return True
