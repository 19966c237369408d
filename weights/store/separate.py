"""A cpu device with memory of its own: units in pages that bytes are copied into (ADR 0054).

Units outlive the arenas that brought them: the next arena with equal units shares their pages, and
only missing ones are copied. A unit is hashed before it is copied, and is known by the hash that
was computed here. An index with wrong hashes therefore never gives its bytes to other weights.

    allocate    units with known hashes that are here are shared; the others get pages
    fill        a unit whose bytes are all in host memory is hashed; if its content is here by now
                it is shared and its own pages are freed, else it is copied
    handle      the pages of all units, once every unit is here
    release     units of which every byte is here stay, reusable
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from heapq import heappop, heappush

from shared.contracts.segment import MappedUnit, PagesHandle, PagesLayout, SegmentTensor, UnitPages
from shared.errors import DeviceFailed, DeviceMissing, InsufficientMemory, ThawError
from weights.devices.cpu import check_range, wait_for
from weights.devices.grouping import Ranges
from weights.devices.port import Contents, Place, Priority
from weights.formats.execution_order import Rank, execution_rank
from weights.store.auditing import Audit, Snapshot, audit_mappings, audit_records
from weights.store.cost import Likelihood, Tier, equally_likely, expected_loads, reload_cost
from weights.store.generations import EarlierPages
from weights.store.memory import PageMemory, extents_of
from weights.store.missing import Missing, digests_of
from weights.store.pages import Reservation, Store, condemn, give_back, lend, release, reserve, settle
from weights.store.residency import KnownUnits, LoadingWeights, residency
from weights.store.units import PAGE_BYTES, Unit, address_range, content_key, cut_units, tensors_of
from weights.store.usage import PagesInUse, pages_in_use

log = logging.getLogger(__name__)
SAMPLE_BYTES = 16 * 1024 * 1024
"""Reused units of about this many bytes are checked for each arena where not all of them are."""
_RATE_WEIGHT = 0.2


class PagedArena:
    """The units of one segment. All its fields are guarded by the device's lock.

    Attributes:
        ready: Units whose bytes are all in host memory, by execution order.
        here: Units that are on the device, in the order in which they became so.
    """

    def __init__(self, device: SeparateDevice, holder: str, place: Place, priority: Priority, units: Sequence[Unit]) -> None:
        self._device, self.holder, self.place, self.priority = device, holder, place, priority
        self.units = tuple(units)
        self.keys = [u.key for u in units]
        self.missing: dict[int, Missing] = {}
        self.ready: list[tuple[Rank, int]] = []
        self.here: list[int] = []
        self.under_way = 0
        self.is_open = True
        self.error: ThawError | None = None
        self.copied_bytes = self.reused_bytes = 0
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
                self._arrived(index, offset, address, nbytes)
            self._device.changed.notify_all()

    def _arrived(self, index: int, offset: int, address: int, nbytes: int) -> None:
        missing = self.missing.get(index)
        if missing is None:
            return
        start, end = max(offset, missing.unit.offset), min(offset + nbytes, missing.unit.end)
        if start < end:
            missing.pieces.append((start, address + start - offset, end - start))
            missing.arrived += end - start
            if missing.arrived == missing.unit.nbytes:
                heappush(self.ready, (min(execution_rank(t.name) for t in missing.tensors), index))

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        def done() -> bool:
            if self.error is not None:
                raise self.error
            return self.is_open and self._watermark() >= until

        return wait_for(self._device.changed, done, lambda: not self.is_open, cancelled)

    def wait_units(self, after: int) -> tuple[UnitPages, ...]:
        """Block until more than `after` units are on the device.

        Returns:
            The pages of the units from the `after`-th on; none if all are there or the arena was
            released.

        Raises:
            DeviceFailed: The device has failed.
        """

        def done() -> bool:
            if self.error is not None:
                raise self.error
            return self.is_open and (len(self.here) > after or not self.missing)

        with self._device.changed:
            wait_for(self._device.changed, done, lambda: not self.is_open, None)
            return self._device.pages_of(self, self.here[after:]) if self.is_open else ()

    def layout(self) -> PagesLayout:
        """Return the address range that an engine maps the units into."""
        places = address_range(self.units)
        units = tuple(
            MappedUnit(offset=u.offset, nbytes=u.nbytes, start=start) for u, start in zip(self.units, places.starts, strict=True)
        )
        return PagesLayout(device=self._device.device_id, nbytes=places.nbytes, file=self._device.file, units=units)

    def handle(self) -> PagesHandle | None:
        with self._device.changed:
            return self._device.handle_of(self) if self.is_open and not self.missing else None

    def raise_priority(self, priority: Priority) -> None:
        with self._device.changed:
            self.priority = priority

    def release(self) -> int:
        """Release the units; they stay for reuse, so no byte is given back."""
        self._device.remove(self)
        return 0


class SeparateDevice:
    """The pages of one cpu device, and the thread that copies into them.

    Attributes:
        changed: Notified on every change; its lock guards the store and all arenas.
    """

    def __init__(
        self,
        device_id: str,
        nbytes: int,
        name: str | None,
        *,
        earlier: Sequence[EarlierPages] = (),
        verify: bool = False,
        known: KnownUnits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the device's pages.

        Args:
            nbytes: Size of the memory, rounded down to pages.
            name: Name of the file under /dev/shm; None: without a name.
            earlier: Files of earlier loaders, whose mapped pages count against this device.
            verify: Check the hashes of all reused units; otherwise of a sample.
            known: The units of weights, which the loader's devices share.
        """
        self._known = known or KnownUnits()
        self._likelihood: Likelihood = equally_likely
        self._device_id, self._file, self._verify, self._clock = device_id, name, verify, clock
        count = nbytes // PAGE_BYTES
        if count < 1:
            raise ValueError(f"{device_id}: {nbytes} bytes are less than a page of {PAGE_BYTES}")
        self._memory = PageMemory(name, count)
        self._store = Store.empty(count)
        self._tier_of: Callable[[str], Tier] = lambda _: "ssd"
        self._earlier = list(earlier)
        self.changed = threading.Condition()
        self._arenas: dict[str, PagedArena] = {}
        self._opening: set[str] = set()
        self._numbers = itertools.count(1)
        self._members: dict[str, tuple[str, frozenset[str]]] = {}
        self._pinned: dict[str, frozenset[str]] = {}
        self._checked: dict[str, int] = {}
        self._copied_bytes = self._reused_bytes = 0
        self._rate: float | None = None
        self._closing = False
        with self.changed:
            self._count_earlier()
        self._thread = threading.Thread(target=self._run, name=f"copy-{device_id}", daemon=True)
        self._thread.start()

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def file(self) -> str:
        """Return the name of the pages' file under /dev/shm; empty without one."""
        return self._file or ""

    @property
    def link(self) -> str | None:
        return f"bus:{self._device_id}"

    @property
    def queued_bytes(self) -> int:
        with self.changed:
            return sum(m.arrived for a in self._arenas.values() for m in a.missing.values())

    @property
    def bytes_per_second(self) -> float | None:
        return self._rate

    def pin(self, address: int, nbytes: int) -> None:
        """Do nothing: copies read pages as they are."""

    def unpin(self, address: int) -> None:
        """Do nothing: no page was pinned."""

    def price_by(self, tier_of: Callable[[str], Tier]) -> None:
        """Price reloads by the tier that `tier_of` returns for weights."""
        self._tier_of = tier_of

    def expect(self, likelihoods: Mapping[str, float] | None) -> None:
        """Price reloads by the likelihoods of weights, by their id; None: all are equal."""
        self._likelihood = equally_likely if likelihoods is None else expected_loads(likelihoods, self._known.users)

    # -- arenas ------------------------------------------------------------------------------------

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> PagedArena:
        contents = place.contents or _whole(place)
        holder = f"arena-{next(self._numbers)}"
        with self.changed:
            if self._closing:
                raise DeviceMissing(f"{self._device_id} is closed")
            self._opening.add(holder)
            known = {**contents.digests, **self._known.digests(place.weights_id)}
        units = cut_units(contents.tensors, known, place.weights_id)
        try:
            return self._opened(holder, place, contents, priority, units)
        finally:
            with self.changed:
                self._opening.discard(holder)
                if holder not in self._arenas:  # the reservation of an arena that failed to open
                    self._store, _ = release(self._store, holder, self._clock())

    def _opened(self, holder: str, place: Place, contents: Contents, priority: Priority, units: tuple[Unit, ...]) -> PagedArena:
        tensors = tensors_of(units, contents.tensors)
        while True:
            with self.changed:
                arena = self._reserved(holder, place, contents, priority, units, tensors)
                suspects = self._to_check(arena)
            damaged = [i for i in suspects if self._hash_here(arena, i, tensors[i]) != arena.keys[i]]
            with self.changed:
                if not damaged:
                    self._arenas[holder] = arena
                    arena.here = [i for i in range(len(units)) if i not in arena.missing]
                    self._reused_bytes += arena.reused_bytes
                    self._join(place, contents, arena)
                    return arena
                self._discard(arena, damaged)

    def _reserved(
        self,
        holder: str,
        place: Place,
        contents: Contents,
        priority: Priority,
        units: tuple[Unit, ...],
        tensors: tuple[tuple[SegmentTensor, ...], ...],
    ) -> PagedArena:
        arena = PagedArena(self, holder, place, priority, units)
        wanted = []
        for index, unit in enumerate(units):
            stored = self._store.units.get(unit.key)
            if stored is not None and stored.is_complete and stored.nbytes == unit.nbytes:
                wanted.append(unit)
                arena.reused_bytes += unit.nbytes
            else:
                key = f"filling:{holder}:{index}"
                wanted.append(replace(unit, key=key))
                arena.keys[index] = key
                arena.missing[index] = Missing(unit, key, tensors[index])
        found, kept = self._reserve(holder, place.weights_id, wanted)
        if found is None:
            need = sum(m.unit.pages for m in arena.missing.values()) * PAGE_BYTES
            given_up = (u for k, u in self._store.units.items() if u.is_reusable and k not in kept and k not in arena.keys)
            can = (len(self._store.free) + sum(len(u.pages) for u in given_up)) * PAGE_BYTES
            raise InsufficientMemory(
                f"The weights of {contents.model or place.weights_id} need {need >> 20} MiB more of {self._device_id}, of which "
                f"{can >> 20} MiB can be given: the rest is in use, pinned or lent. Stop other models there, or enlarge it",
                should_retry=True,
            )
        self._store = found.store
        if found.reclaimed:
            log.info("reclaimed units", extra={"device": self._device_id, "units": len(found.reclaimed)})
        return arena

    def _reserve(self, holder: str, weights_id: str, wanted: Sequence[Unit]) -> tuple[Reservation | None, set[str]]:
        """Reserve the wanted units. The second value: keys that were not to be reclaimed."""
        short = sum(u.pages for u in wanted if u.key not in self._store.units) > len(self._store.free)
        keep: set[str] = set()
        if short:
            self._count_earlier()
            keep.update(*self._pinned.values())
            # A holder is removed when its process has ended; this is the proof.
            mapped = self._memory.mapped_by_others()
            keep.update(k for k, u in self._store.units.items() if any(p in mapped for p in u.pages))
        cost = reload_cost(cache(self._tier_of), self._likelihood)
        return reserve(self._store, holder, weights_id, wanted, self._clock(), cost, keep), keep

    def _join(self, place: Place, contents: Contents, arena: PagedArena) -> None:
        """Remember which units the weights have, as far as they are known."""
        keys = frozenset(arena.keys)
        self._members[place.weights_id] = (contents.model or place.weights_id, keys)
        self._pinned.pop(place.weights_id, None)
        if contents.is_pinned:
            self._pinned[place.weights_id] = keys

    def _count_earlier(self) -> None:
        """Lend as many pages as earlier loaders' files still have, and take back the others."""
        for earlier in tuple(self._earlier):
            pages = earlier.mapped()
            lent = self._store.lent.get(earlier.name, ())
            if pages < len(lent):
                self._store = give_back(self._store, earlier.name, lent[pages:])
            elif (more := min(pages - len(lent), len(self._store.free))) > 0:
                granted = lend(self._store, earlier.name, more, lambda _: 0.0)
                assert granted is not None
                self._store = granted[0]
            if not pages:
                earlier.close(unlink=True)
                self._earlier.remove(earlier)

    def handle_of(self, arena: PagedArena) -> PagesHandle:
        """Return the handle of an arena whose units are all here."""
        stored, layout = [self._store.units[key] for key in arena.keys], arena.layout()
        return PagesHandle(
            device=layout.device, nbytes=layout.nbytes, file=layout.file, extents=extents_of(stored), units=layout.units
        )

    def pages_of(self, arena: PagedArena, indexes: Sequence[int]) -> tuple[UnitPages, ...]:
        """Return where these units of an arena are."""
        stored = [self._store.units[arena.keys[i]] for i in indexes]
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
                self._store, _ = release(self._store, arena.holder, self._clock())

    def close(self) -> None:
        """Release all arenas. The file stays while engines map it, for the next loader to count."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            arenas = list(self._arenas.values())
        for arena in arenas:
            arena.release()
        with self.changed:
            self.changed.notify_all()
        self._thread.join()
        for earlier in self._earlier:
            earlier.close(unlink=not earlier.mapped())
        self._memory.close(unlink=not self._memory.mapped_by_others())

    # -- hashes ------------------------------------------------------------------------------------

    def _to_check(self, arena: PagedArena) -> list[int]:
        """Choose reused units to check: all, or those unchecked for the longest time."""
        reused = [i for i in range(len(arena.units)) if i not in arena.missing]
        if not self._verify:
            reused.sort(key=lambda i: self._checked.get(arena.keys[i], 0))
            sizes = itertools.accumulate((arena.units[i].nbytes for i in reused), initial=0)
            reused = [i for i, before in zip(reused, sizes, strict=False) if before < SAMPLE_BYTES]
        turn = max(self._checked.values(), default=0) + 1
        self._checked.update(dict.fromkeys((arena.keys[i] for i in reused), turn))
        if len(self._checked) > 4 * self._store.count:
            self._checked = {k: n for k, n in self._checked.items() if k in self._store.units}
        return reused

    def _hash_here(self, arena: PagedArena, index: int, tensors: Sequence[SegmentTensor]) -> str:
        """Return the key of a unit by its bytes on the device. The arena holds it."""
        unit, stored = arena.units[index], self._store.units[arena.keys[index]]
        digests = {}
        for tensor in tensors:
            digest = hashlib.sha256()
            for view in self._memory.views(stored, tensor.offset - unit.offset, tensor.nbytes):
                digest.update(view)
            digests[tensor.name] = digest.hexdigest()
        return content_key(unit.offset, tensors, digests)

    def _discard(self, arena: PagedArena, damaged: Sequence[int]) -> None:
        """Give the reservation back, and take damaged units out of use."""
        self._store, _ = release(self._store, arena.holder, self._clock())
        for key in {arena.keys[i] for i in damaged}:
            log.error("the bytes of a reused unit have changed; it is copied again", extra={"device": self._device_id, "unit": key})
            if key in self._store.units:
                self._store = condemn(self._store, key, next(self._numbers))

    # -- the copying thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self.changed:
                while (arena := self._next()) is None:
                    if self._closing:
                        return
                    self.changed.wait()
                _, index = heappop(arena.ready)
                arena.under_way += 1
            error: ThawError | None = None
            try:
                self._bring(arena, index)
            except OSError as e:
                error = _failure(self._device_id, e)
            except Exception as e:  # the thread's boundary: waiters need an answer
                log.exception("failed to copy a unit", extra={"device": self._device_id})
                error = DeviceFailed(f"{self._device_id}: {type(e).__name__}: {e}")
            with self.changed:
                arena.under_way -= 1
                arena.error = arena.error or error
                if arena.error is not None:
                    arena.ready.clear()
                self.changed.notify_all()

    def _next(self) -> PagedArena | None:
        waiting = [a for a in self._arenas.values() if a.ready]
        return min(waiting, key=lambda a: (a.priority, int(a.holder.removeprefix("arena-"))), default=None)

    def _bring(self, arena: PagedArena, index: int) -> None:
        """Share the unit's content if it is here, else copy it."""
        began, missing = self._clock(), arena.missing[index]
        digests = digests_of(missing)
        key = content_key(missing.unit.offset, missing.tensors, digests)
        if missing.unit.key.startswith("sha256:") and key != missing.unit.key:
            log.warning(
                "weights differ from the hashes in their index",
                extra={"device": self._device_id, "weights": arena.place.weights_id},
            )
        with self.changed:
            # At once: content that is here now may be reclaimed as soon as the lock is free.
            if key in self._store.units:
                self._settle(arena, index, key, digests, copied_bytes=0)
                return
            stored = self._store.units[missing.key]
        for offset, address, nbytes in missing.pieces:
            self._memory.write(stored, offset - missing.unit.offset, address, nbytes)
        rate = missing.unit.nbytes / max(self._clock() - began, 1e-9)
        self._rate = rate if self._rate is None else self._rate + _RATE_WEIGHT * (rate - self._rate)
        with self.changed:
            self._settle(arena, index, key, digests, copied_bytes=missing.unit.nbytes)

    def _settle(self, arena: PagedArena, index: int, key: str, digests: dict[str, str], *, copied_bytes: int) -> None:
        missing = arena.missing.pop(index)
        self._store = settle(self._store, missing.key, key)
        arena.keys[index] = key
        arena.here.append(index)
        arena.digests.update(digests)
        reused_bytes = missing.unit.nbytes - copied_bytes
        arena.copied_bytes += copied_bytes
        arena.reused_bytes += reused_bytes
        self._copied_bytes += copied_bytes
        self._reused_bytes += reused_bytes
        if not arena.missing:
            self._completed(arena)

    def _completed(self, arena: PagedArena) -> None:
        place = arena.place
        self._join(place, place.contents or _whole(place), arena)
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
            store = self._store
            self._members = {w: (m, k) for w, (m, k) in self._members.items() if not k.isdisjoint(store.units)}
            used = pages_in_use(
                self._device_id, store, self._members, copied_bytes=self._copied_bytes, reused_bytes=self._reused_bytes
            )
            loading = [
                LoadingWeights(a.place.weights_id, frozenset(a.keys), sum(m.unit.nbytes for m in a.missing.values()))
                for a in self._arenas.values()
            ]
        return replace(used, weights=residency(store, self._known, loading))

    def snapshot(self) -> Snapshot:
        """Return the records of this moment, for an audit."""
        with self.changed:
            return Snapshot(self._device_id, self._store, frozenset(self._arenas), frozenset(self._opening))

    def audit(self) -> list[str]:
        """Return the violations of conservation in the records."""
        return audit_records(self.snapshot())

    def audit_mapped(self) -> Audit:
        """Audit the records, and the pages that processes map. Blocks for a moment."""
        with self.changed:
            self._count_earlier()
        before = self.snapshot()
        mapped = self._memory.mapped_by_others()
        return audit_mappings(before, mapped, self.snapshot())


def _whole(place: Place) -> Contents:
    """Treat a segment of unknown contents as one tensor."""
    whole = SegmentTensor(name="", dtype="U8", shape=(place.nbytes,), offset=0, nbytes=place.nbytes)
    return Contents((whole,))


def _failure(device_id: str, error: OSError) -> ThawError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return InsufficientMemory(
            f"The host has no memory for the pages of {device_id}: lower the devices' sizes, or enlarge /dev/shm", should_retry=True
        )
    return DeviceFailed(f"{device_id}: {error}")
