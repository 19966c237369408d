"""The pages of one separate device in use: who has them, and which weights their units belong to.

All methods are called with the device's lock held.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from shared.contracts.segment import SegmentTensor
from shared.errors import InsufficientMemory
from weights.devices.port import Contents, Place
from weights.formats.execution_order import execution_rank
from weights.store.arena import PagedArena
from weights.store.cost import Likelihood, Tier, equally_likely, reload_cost
from weights.store.generations import EarlierPages
from weights.store.memory import UnitMemory
from weights.store.missing import Missing
from weights.store.pages import (
    Cost,
    Keep,
    Reservation,
    Store,
    StoredUnit,
    condemn,
    give_back,
    give_up,
    keep_none,
    lend,
    release,
    reserve,
    settle,
    share,
    spared_pages,
)
from weights.store.units import PAGE_BYTES, Unit
from weights.store.usage import PagesInUse, pages_in_use

log = logging.getLogger(__name__)
COUNT_EARLIER_S = 1.0
AHEAD_BYTES = 16 * PAGE_BYTES
"""Units of unknown content get pages before they are hashed, for at most this many bytes."""


class DevicePages:
    """The store of one device, and what is known of the weights in it.

    Attributes:
        store: The pages.
        tier_of: The tier that weights would be loaded from again, by their id.
        likelihood: The likelihood that a unit is loaded again soon.
        short_pages: Pages that the last reservation lacked.
        changed_units: Units whose bytes loads found changed, here or on another device.
    """

    def __init__(
        self, device_id: str, memory: UnitMemory, count: int, earlier: Sequence[EarlierPages], clock: Callable[[], float]
    ) -> None:
        """Start with free pages, except those that `earlier` files still have."""
        self._device_id, self._memory, self._clock = device_id, memory, clock
        self.store = Store.empty(count, has_runs=memory.has_runs)
        self.tier_of: Callable[[str], Tier] = lambda _: "ssd"
        self.likelihood: Likelihood = equally_likely
        self.earlier = list(earlier)
        self._counted_at = 0.0
        self.short_pages = self.changed_units = 0
        self._damaged = itertools.count(1)
        self._members: dict[str, tuple[str, frozenset[str]]] = {}
        self._pinned: dict[str, frozenset[str]] = {}
        self._copied_bytes = self._reused_bytes = self._peer_bytes = 0
        self.count_earlier()

    # -- arenas ------------------------------------------------------------------------------------

    def reserve(self, arena: PagedArena, contents: Contents, tensors: Sequence[tuple[SegmentTensor, ...]]) -> None:
        """Share the arena's units that are here, and reserve pages for the others.

        Units of unknown content get none yet: `reserve_ahead` reserves them once one is hashed.

        Raises:
            InsufficientMemory: Nothing has changed then.
        """
        wanted = []
        for index, unit in enumerate(arena.units):
            stored = self.store.units.get(unit.key)
            if stored is not None and stored.is_complete and stored.nbytes == unit.nbytes:
                wanted.append(unit)
                arena.reused_bytes += unit.nbytes
            else:
                key = f"filling:{arena.holder}:{index}"
                arena.keys[index] = key
                rank = min(execution_rank(t.name) for t in tensors[index])
                is_known = unit.key.startswith("sha256:")
                arena.missing[index] = Missing(unit, key, tensors[index], rank=rank, has_pages=is_known)
                if is_known:
                    wanted.append(replace(unit, key=key))
        found, keep = self._reserve(arena.holder, arena.place.weights_id, wanted)
        unknown = sum(m.unit.pages for m in arena.missing.values() if not m.has_pages)
        if found is None or unknown > obtainable_pages(found.store):
            raise self._no_room(arena, [m.unit for m in arena.missing.values()], keep)
        self.store = found.store
        if found.reclaimed:
            log.info("reclaimed units", extra={"device": self._device_id, "units": len(found.reclaimed)})

    def reserve_ahead(self, arena: PagedArena, index: int) -> None:
        """Reserve pages for a unit whose content is not here, and for some that follow it.

        A few units at a time cost less: each reservation copies the store. Pages of units that turn
        out to be here are freed again.

        Raises:
            InsufficientMemory: There are none for the unit itself.
        """
        following = (i for i, m in sorted(arena.missing.items(), key=lambda item: (item[1].rank, item[0])) if not m.has_pages)
        ahead, nbytes = [index], 0
        for i in (i for i in following if i != index):
            if (nbytes := nbytes + arena.missing[i].unit.nbytes) > AHEAD_BYTES:
                break
            ahead.append(i)
        for chosen in (ahead, [index]):
            wanted = [replace(arena.missing[i].unit, key=arena.missing[i].key) for i in chosen]
            found, keep = self._reserve(arena.holder, arena.place.weights_id, wanted)
            if found is not None:
                self.store = found.store
                for i in chosen:
                    arena.missing[i].has_pages = True
                return
        raise self._no_room(arena, [arena.missing[index].unit], keep)

    def _no_room(self, arena: PagedArena, units: Sequence[Unit], keep: Keep) -> InsufficientMemory:
        """Return the error of a reservation for `units`, and note how many pages are short."""
        need = sum(u.pages for u in units) * PAGE_BYTES
        given_up = (u for k, u in self.store.units.items() if u.is_reusable and k not in arena.keys and not keep(u))
        can = (len(self.store.free) + sum(len(u.pages) for u in given_up)) * PAGE_BYTES
        self.short_pages = max(1, (need - can) // PAGE_BYTES)
        name = arena.place.contents.model if arena.place.contents is not None else ""
        return InsufficientMemory(
            f"The weights of {name or arena.place.weights_id} need {need >> 20} MiB more of {self._device_id}, of which "
            f"{can >> 20} MiB can be given: the rest is in use, pinned or lent. Stop other models there, or enlarge it",
            should_retry=True,
        )

    def _reserve(self, holder: str, weights_id: str, wanted: Sequence[Unit]) -> tuple[Reservation | None, Keep]:
        """Reserve the wanted units. The second value: the units that were not to be reclaimed."""
        pages = sum(u.pages for u in wanted if u.key not in self.store.units)
        short = pages + spared_pages(self.store) > len(self.store.free)
        keep = self.keep() if short else keep_none
        return reserve(self.store, holder, weights_id, wanted, self._clock(), self.cost(), keep), keep

    def keep(self) -> Keep:
        """Return which units are not to be reclaimed now: pinned, or mapped by a process."""
        self.count_earlier()
        pinned: frozenset[str] = frozenset().union(*self._pinned.values())

        known: dict[str, bool] = {}

        def is_kept(unit: StoredUnit) -> bool:
            # A holder is removed when its process has ended; the mappings are the proof.
            if unit.key not in known:
                known[unit.key] = unit.key in pinned or bool(self._memory.mapped_among(unit.pages))
            return known[unit.key]

        return is_kept

    def cost(self) -> Cost:
        """Return the expected cost of having to load units again."""
        return reload_cost(cache(self.tier_of), self.likelihood)

    def hold(self, holder: str, units: Iterable[Unit]) -> dict[str, StoredUnit]:
        """Hold those of the units that are complete here."""
        stored = self.store.units
        here = [u for u in units if (s := stored.get(u.key)) is not None and s.is_complete and s.nbytes == u.nbytes]
        held = {u.key: replace(stored[u.key], holders=stored[u.key].holders | {holder}) for u in here}
        self.store = replace(self.store, units={**stored, **held})
        return held

    def join(self, place: Place, contents: Contents, arena: PagedArena) -> None:
        """Remember which units the weights have, as far as they are known."""
        keys = frozenset(arena.keys)
        self._members[place.weights_id] = (contents.model or place.weights_id, keys)
        self._pinned.pop(place.weights_id, None)
        if contents.is_pinned:
            self._pinned[place.weights_id] = keys

    def count_reused(self, nbytes: int) -> None:
        """Count bytes that a load found here."""
        self._reused_bytes += nbytes

    def settle(
        self, arena: PagedArena, index: int, key: str, digests: Mapping[str, str], *, copied_bytes: int, is_from_peer: bool = False
    ) -> None:
        """Complete a unit of the arena under the key of its content."""
        missing = arena.missing.pop(index)
        if missing.has_pages:
            self.store = settle(self.store, missing.key, key)
        else:
            unit = replace(missing.unit, key=key)
            self.store = share(self.store, arena.holder, arena.place.weights_id, unit, self._clock())
        arena.keys[index] = key
        arena.report(index)
        arena.digests.update(digests)
        reused_bytes = missing.unit.nbytes - copied_bytes
        arena.copied_bytes += copied_bytes
        arena.reused_bytes += reused_bytes
        self._copied_bytes += copied_bytes
        self._peer_bytes += copied_bytes if is_from_peer else 0
        self._reused_bytes += reused_bytes

    def release(self, holder: str) -> None:
        """Release the units of an arena, by its holder."""
        self.store, _ = release(self.store, holder, self._clock())

    def limit_reusable(self, pages: int) -> None:
        """Give up reusable units beyond `pages` pages, but those that are pinned or mapped."""
        excess = self.store.reusable_pages - pages
        if excess > 0:
            self.store, units = give_up(self.store, excess, self.cost(), self.keep())
            log.info("gave up units beyond the limit", extra={"device": self._device_id, "units": len(units)})

    def discard(self, arena: PagedArena, damaged: Sequence[int]) -> None:
        """Give the reservation back, and take damaged units out of use."""
        self.release(arena.holder)
        for key in {arena.keys[i] for i in damaged}:
            self.changed_units += 1
            log.error("the bytes of a reused unit have changed; it is copied again", extra={"device": self._device_id, "unit": key})
            if key in self.store.units:
                self.store = condemn(self.store, key, next(self._damaged))

    # -- earlier loaders, status -------------------------------------------------------------------

    def count_earlier(self) -> None:
        """Lend as many pages as earlier loaders' files still have, and take back the others."""
        self._counted_at = self._clock()
        for earlier in tuple(self.earlier):
            pages = earlier.free_unmapped()
            lent = self.store.lent.get(earlier.name, ())
            if pages < len(lent):
                self.store = give_back(self.store, earlier.name, lent[pages:])
            elif (more := min(pages - len(lent), len(self.store.free))) > 0:
                granted = lend(self.store, earlier.name, more, lambda _: 0.0)
                assert granted is not None
                self.store = granted[0]
            if not pages:
                earlier.close(unlink=True)
                self.earlier.remove(earlier)

    def in_use(self) -> PagesInUse:
        """Return how the pages are used now.

        Processes may have unmapped pages of earlier loaders without a message. These are counted
        again, at most once in `COUNT_EARLIER_S` because that reads the mappings of all processes.
        """
        if self.earlier and self._clock() - self._counted_at >= COUNT_EARLIER_S:
            self.count_earlier()
        self._members = {w: (m, k) for w, (m, k) in self._members.items() if not k.isdisjoint(self.store.units)}
        used = pages_in_use(
            self._device_id, self.store, self._members, copied_bytes=self._copied_bytes, reused_bytes=self._reused_bytes
        )
        return replace(used, peer_bytes=self._peer_bytes, changed_units=self.changed_units)


def obtainable_pages(store: Store) -> int:
    """Return the most pages that units of unknown content can get or share."""
    return len(store.free) + sum(len(u.pages) for u in store.units.values() if u.is_complete)
