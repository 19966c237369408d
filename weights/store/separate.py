"""A device with memory of its own: pages that the loader copies units into (ADR 0054).

Units outlive their arenas: the next arena with equal units shares their pages, and only missing
units are copied. The device hashes each unit before the copy, and identifies units by these hashes.
An index with wrong hashes therefore never gives its bytes to other weights.

    allocate    share units with known hashes that are on the device; reserve pages for the others
                with known hashes
    fill        hash a unit when all its bytes are in host memory. If the device has the content by
                then, share it and free the unit's own pages; otherwise copy it (`CopyThread`). A
                unit of unknown content gets its pages at this time
    handle      return the pages of all units, once every unit is on the device
    release     keep complete units as reusable ones

`DevicePages` accounts for the pages; a `PagedArena` has the units of one segment.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shared.contracts.segment import GpuUnitsHandle, PagesHandle, SegmentTensor, UnitPages
from shared.errors import DeviceMissing, InsufficientMemory
from weights.devices.curve import FALLBACK_BYTES
from weights.devices.pacing import Pacer
from weights.devices.port import Contents, Place, Priority
from weights.store.arena import PagedArena
from weights.store.auditing import Audit, Snapshot, audit_mappings, audit_records
from weights.store.checking import Checks, key_on_device
from weights.store.copying import CopyThread
from weights.store.cost import SECONDS_PER_GB, Tier, equally_likely, expected_loads
from weights.store.device_pages import DevicePages
from weights.store.generations import EarlierPages
from weights.store.lending import Lender
from weights.store.memory import PageMemory, UnitMemory, extents_of
from weights.store.pages import Cost, Keep, Store, StoredUnit
from weights.store.peers import TYPICAL_BYTES_PER_SECOND, PeerLink, PeerThread
from weights.store.residency import KnownUnits, LoadingWeights, bytes_on_peers, residency
from weights.store.units import PAGE_BYTES, Unit, cut_units, tensors_of
from weights.store.usage import PagesInUse, kv_in_use

log = logging.getLogger(__name__)


class SeparateDevice:
    """The pages of one device, and the thread that copies into them."""

    def __init__(
        self,
        device_id: str,
        nbytes: int,
        name: str | None,
        *,
        earlier: Sequence[EarlierPages] = (),
        verify: bool = False,
        known: KnownUnits | None = None,
        host_bytes_per_second: float | None = None,
        group_bytes: int = FALLBACK_BYTES,
        numa_node: int | None = None,
        memory: UnitMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the device's pages.

        Args:
            nbytes: Size of the memory, rounded down to pages.
            name: Name of the file under /dev/shm; None: without a name.
            earlier: Files of earlier loaders, whose mapped pages count against this device.
            verify: Check the hashes of all reused units; otherwise of a sample.
            known: The units of weights, which the loader's devices share.
            host_bytes_per_second: Pace of copies from host memory; None: as fast as possible.
            group_bytes: Size of the groups in which arenas report units while others wait to be
                copied.
            numa_node: NUMA node that the memory is taken from; None: any node.
            memory: Where the pages are; None: in a file of shared memory.
        """
        count = nbytes // PAGE_BYTES
        if count < 1:
            raise ValueError(f"{device_id}: {nbytes} bytes are less than a page of {PAGE_BYTES}")
        self._device_id, self._file = device_id, name
        self._changed = threading.Condition()
        self._arenas: dict[str, PagedArena] = {}
        self._opening: set[str] = set()
        self._numbers = itertools.count(1)
        self._clock = clock
        self._checks = Checks(every=verify)
        self._known = known or KnownUnits()
        self._closing = False
        self._group_bytes = group_bytes
        self._memory: UnitMemory = memory if memory is not None else PageMemory(name, count)
        self._numa_node = numa_node if numa_node is not None and self._memory.bind(numa_node) else None
        self._pages = DevicePages(device_id, self._memory, count, earlier, clock)
        self._pacer = Pacer(host_bytes_per_second) if host_bytes_per_second is not None else None
        self._copies = CopyThread(self, self._memory, self._arenas, clock, self._pacer)
        self._pacers: dict[str, Pacer] = {}
        self._from_peers = PeerThread(self, self._memory, self._arenas, self._pacers, verify=verify, clock=clock)
        self._readers = 0
        self.lender = Lender(self, self._memory, is_limited=self.bus_id is not None)

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def file(self) -> str:
        """Return the name of the pages' file under /dev/shm; empty without one."""
        return self._file or ""

    @property
    def bus_id(self) -> str | None:
        """Return the PCI bus id of a GPU; None for any other device."""
        return None

    @property
    def lends_kv(self) -> bool:
        """True if KV caches borrow pages of the device."""
        return True

    @property
    def changed(self) -> threading.Condition:
        """Notified on every change; its lock guards the pages and all arenas."""
        return self._changed

    @property
    def link(self) -> str | None:
        return f"bus:{self._device_id}"

    @property
    def group_bytes(self) -> int:
        return self._group_bytes

    @property
    def queued_bytes(self) -> int:
        with self.changed:
            return sum(m.arrived for a in self._arenas.values() for m in a.missing.values())

    @property
    def copied_bytes(self) -> int:
        return self._copies.copied_bytes

    @property
    def bytes_per_second(self) -> float | None:
        return self._copies.bytes_per_second or self.paced_bytes_per_second

    @property
    def paced_bytes_per_second(self) -> float | None:
        return self._pacer.bytes_per_second if self._pacer is not None else None

    def pin(self, address: int, nbytes: int) -> None:
        """Do nothing: copies need no pinned pages."""

    def unpin(self, address: int) -> None:
        """Do nothing: no page was pinned."""

    def price_by(self, tier_of: Callable[[str], Tier]) -> None:
        """Price reloads by the tier that `tier_of` returns for weights."""
        self._pages.tier_of = tier_of

    def expect(self, likelihoods: Mapping[str, float] | None) -> None:
        """Price reloads by the likelihoods of weights, by their id; None: all are equal."""
        self._pages.likelihood = equally_likely if likelihoods is None else expected_loads(likelihoods, self._known.users)

    # -- arenas ------------------------------------------------------------------------------------

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> PagedArena:
        contents = place.contents or _as_one_tensor(place)
        holder = f"arena-{next(self._numbers)}"
        with self.changed:
            if self._closing:
                raise DeviceMissing(f"{self._device_id} is closed")
            self._opening.add(holder)
            known = {**contents.digests, **self._known.digests(place.weights_id)}
        units = cut_units(contents.tensors, known, place.weights_id)
        try:
            arena = self._open(holder, place, contents, priority, units)
            self._from_peers.find(arena, self._host_rate(place.weights_id))
            return arena
        finally:
            with self.changed:
                self._opening.discard(holder)
                if holder not in self._arenas:  # the reservation of an arena that failed to open
                    self._pages.release(holder)

    def _open(self, holder: str, place: Place, contents: Contents, priority: Priority, units: tuple[Unit, ...]) -> PagedArena:
        tensors = tensors_of(units, contents.tensors)
        while True:
            arena = PagedArena(self, holder, place, priority, units)
            arena.group_bytes = self._group_bytes
            with self.changed:
                try:
                    self._pages.reserve(arena, contents, tensors)
                except InsufficientMemory:
                    if not self.lender.wait_for_pages(holder, self._pages.short_pages):
                        raise
                    continue
                self.lender.end_shortage(holder)
                store = self._pages.store
                suspects = self._checks.choose(arena, store.units, 4 * store.count, self._clock())
                stored = {i: store.units[arena.keys[i]] for i in suspects}
            damaged = [i for i, s in stored.items() if key_on_device(self._memory, s, units[i], tensors[i]) != arena.keys[i]]
            with self.changed:
                if not damaged:
                    self._arenas[holder] = arena
                    arena.here = [i for i in range(len(units)) if i not in arena.missing]
                    self._pages.count_reused(arena.reused_bytes)
                    self._pages.join(place, contents, arena)
                    return arena
                self._pages.discard(arena, damaged)

    def count_missing(self, weights_id: str, contents: Contents) -> int | None:
        """Return the bytes of a model's units that are not on the device.

        None if neither this device nor a connected one has a unit of the model, or if the content
        of a unit is unknown before it is read.
        """
        known = {**contents.digests, **self._known.digests(weights_id)}
        units = cut_units(contents.tensors, known, weights_id)
        with self.changed:
            stored = [self._pages.store.units.get(u.key) for u in units]
        here = [s is not None and s.is_complete and s.nbytes == u.nbytes for u, s in zip(units, stored, strict=True)]
        if any(not u.key.startswith("sha256:") for u in units) or not (any(here) or self._from_peers.have_any(units)):
            return None
        return sum(u.nbytes for u, is_here in zip(units, here, strict=True) if not is_here)

    # -- for the lender, which has the lock --------------------------------------------------------

    @property
    def page_count(self) -> int:
        return self._pages.store.count

    def store(self) -> Store:
        return self._pages.store

    def replace_store(self, store: Store) -> None:
        self._pages.store = store

    def keep(self) -> Keep:
        """Return which units are not to be reclaimed now: pinned, or mapped by a process."""
        return self._pages.keep()

    def cost(self) -> Cost:
        """Return the expected cost of having to load units again."""
        return self._pages.cost()

    def now(self) -> float:
        return time.monotonic()

    def handle_of(self, arena: PagedArena) -> PagesHandle | GpuUnitsHandle:
        """Return the handle of an arena with all units on the device."""
        stored, layout = [self._pages.store.units[key] for key in arena.keys], arena.layout()
        return PagesHandle(
            device=layout.device, nbytes=layout.nbytes, file=layout.file, extents=extents_of(stored), units=layout.units
        )

    def pages_of(self, arena: PagedArena, indexes: Sequence[int]) -> tuple[UnitPages, ...]:
        """Return the pages of these units of an arena."""
        stored = [self._pages.store.units[arena.keys[i]] for i in indexes]
        return tuple(UnitPages(unit=i, extents=extents_of((u,))) for i, u in zip(indexes, stored, strict=True))

    def remove(self, arena: PagedArena) -> None:
        """Release an arena's units after the copies in progress."""
        with self.changed:
            if not arena.is_open:
                return
            arena.is_open = False
            arena.ready.clear()
            self.changed.notify_all()
            self.changed.wait_for(lambda: arena.under_way == 0)
            if self._arenas.pop(arena.holder, None) is not None:
                self._pages.release(arena.holder)
                self.lender.notify()
        self._from_peers.forget(arena)

    def close(self) -> None:
        """Release all arenas. The file stays while engines map it, for the next loader to count."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            arenas = list(self._arenas.values())
        for arena in arenas:
            arena.release()
        self._copies.close()
        self._from_peers.close()
        with self.changed:
            self.changed.wait_for(lambda: self._readers == 0)
        for earlier in self._pages.earlier:
            earlier.close(unlink=not earlier.free_unmapped())
        self._memory.close(unlink=not self._memory.mapped_by_others())

    # -- other devices -----------------------------------------------------------------------------

    def connect(self, peers: Mapping[str, SeparateDevice], pacers: Mapping[str, Pacer]) -> None:
        """Copy units from other devices too. Arenas that are open already are not searched for.

        Args:
            peers: All other devices, by id.
            pacers: The paced links to them.
        """
        self._pacers.update(pacers)
        self._from_peers.connect(peers)

    @property
    def memory(self) -> UnitMemory:
        """The pages, for copies to other devices."""
        return self._memory

    def hold(self, holder: str, units: Iterable[Unit]) -> Mapping[str, StoredUnit]:
        """Keep those of the units that are on the device from being reclaimed until `unhold`."""
        with self.changed:
            if self._closing:
                return {}
            found = self._pages.hold(holder, units)
            if found:
                self._opening.add(holder)
            return found

    def complete_units(self) -> Mapping[str, int]:
        """Return the sizes in bytes of the complete units with known content, by key."""
        with self.changed:
            units = self._pages.store.units
        return {k: u.nbytes for k, u in units.items() if u.is_complete and k.startswith("sha256:")}

    @property
    def peer_links(self) -> list[PeerLink]:
        """The links from other devices that are in use, or whose bandwidth is known."""
        with self.changed:
            return self._from_peers.links()

    def has_any(self, units: Iterable[Unit]) -> bool:
        """True if the device has one of the units, complete."""
        with self.changed:
            stored = self._pages.store.units
            return any((s := stored.get(u.key)) is not None and s.is_complete and s.nbytes == u.nbytes for u in units)

    def unhold(self, holder: str) -> None:
        """Release the units of `hold`."""
        with self.changed:
            if holder in self._opening:
                self._opening.discard(holder)
                self._pages.release(holder)
                self.changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the memory mapped meanwhile. Raises `DeviceMissing` if the device is closed."""
        with self.changed:
            if self._closing:
                raise DeviceMissing(f"{self._device_id} is closed")
            self._readers += 1
        try:
            yield
        finally:
            with self.changed:
                self._readers -= 1
                self.changed.notify_all()

    def _host_rate(self, weights_id: str) -> float:
        """Return the expected bandwidth by way of host memory, reading included."""
        link = self.bytes_per_second or TYPICAL_BYTES_PER_SECOND
        return min(link, 1e9 / SECONDS_PER_GB[self._pages.tier_of(weights_id)])

    # -- for the copying thread --------------------------------------------------------------------

    def find_unit(self, key: str) -> StoredUnit | None:
        return self._pages.store.units.get(key)

    def count_changed(self) -> None:
        self._pages.changed_units += 1

    def reserve_ahead(self, arena: PagedArena, index: int) -> None:
        while arena.is_open:
            try:
                self._pages.reserve_ahead(arena, index)
            except InsufficientMemory:
                if not self.lender.wait_for_pages(arena.holder, self._pages.short_pages):
                    raise
                continue
            break
        self.lender.end_shortage(arena.holder)  # also that of an arena which was released while it waited

    def settle(
        self, arena: PagedArena, index: int, key: str, digests: Mapping[str, str], *, copied_bytes: int, is_from_peer: bool = False
    ) -> None:
        self._pages.settle(arena, index, key, digests, copied_bytes=copied_bytes, is_from_peer=is_from_peer)
        if arena.missing:
            return
        place = arena.place
        self._pages.join(place, place.contents or _as_one_tensor(place), arena)
        units = [replace(u, key=k) for u, k in zip(arena.units, arena.keys, strict=True)]
        self._known.learn(place.weights_id, units, arena.digests)
        log.info(
            "weights are on the device",
            extra={
                "device": self._device_id,
                "weights": place.weights_id,
                "copied_bytes": arena.copied_bytes,
                "reused_bytes": arena.reused_bytes,
            },
        )

    # -- status ------------------------------------------------------------------------------------

    def pages(self) -> PagesInUse:
        """Return how the pages are used now."""
        with self.changed:
            used, store = self._pages.in_use(), self._pages.store
            kv = kv_in_use(store, self.lender.borrowers)
            loading = [
                LoadingWeights(
                    a.place.weights_id,
                    frozenset(a.keys),
                    sum(m.unit.nbytes for m in a.missing.values()),
                    sum(m.unit.pages for m in a.missing.values() if not m.has_pages) * PAGE_BYTES,
                )
                for a in self._arenas.values()
            ]
        on_peers = bytes_on_peers(self._from_peers.complete_units(), store, self._known)
        weights = residency(store, self._known, loading, on_peers)
        used = replace(used, weights=weights, kv=kv, is_lending=self.lends_kv)
        return replace(used, paced_bytes_per_second=self.paced_bytes_per_second, numa_node=self._numa_node)

    def snapshot(self) -> Snapshot:
        """Return the records of this moment, for an audit."""
        with self.changed:
            borrowers: dict[str, int | None] = {name: b.pid for name, b in self.lender.borrowers.items()}
            borrowers |= dict.fromkeys((e.name for e in self._pages.earlier), None)
            store, changed = self._pages.store, self._pages.changed_units
            return Snapshot(self._device_id, store, frozenset(self._arenas), frozenset(self._opening), borrowers, changed)

    def audit(self) -> list[str]:
        """Return the violations of conservation in the records."""
        return audit_records(self.snapshot())

    def audit_mapped(self) -> Audit:
        """Audit the records, and the pages that processes map. Blocks for a moment."""
        return self.end_audit(self.begin_audit())

    def begin_audit(self) -> Snapshot:
        """Return the records before the mappings of processes are read, for `end_audit`."""
        with self.changed:
            self._pages.count_earlier()
        return self.snapshot()

    def end_audit(self, before: Snapshot, mappings: Mapping[int, bytes] | None = None) -> Audit:
        """Audit the records, and the pages that processes map.

        Args:
            mappings: Those read since `begin_audit`, if one reading serves several devices.
        """
        return audit_mappings(before, self._memory.mapped_by_others(mappings), self.snapshot())


def _as_one_tensor(place: Place) -> Contents:
    """Treat a segment of unknown contents as one tensor."""
    whole = SegmentTensor(name="", dtype="U8", shape=(place.nbytes,), offset=0, nbytes=place.nbytes)
    return Contents((whole,))
