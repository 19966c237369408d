"""Track the pages of one device: which unit or borrower has each (ADR 0054).

Only the functions of this module change the store, which has values only. A page is at any time

- free,
- in one unit: `filling` until its bytes are there, `mapped` while it has holders, else `reusable`,
- or lent to one borrower, for a KV cache.

A holder or borrower is removed only after it is proved that its process maps nothing any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from weights.store.units import Unit, pages_of

DAMAGED = "damaged:"
"""Prefix of the keys of units with wrong bytes, which are freed with their last holder."""
Cost = Callable[["StoredUnit"], float]
"""Expected cost of having to load a unit again (Tangram Eq. 2)."""
Keep = Callable[["StoredUnit"], bool]
"""True for a reusable unit that is not reclaimed. Asked only of units that would be."""
SHORT_RUN_PAGES = 32
"""Free pages in shorter runs are spared: a unit of such runs would need many mappings."""
SPARED_PART = 32
"""At most one of this many pages is spared."""


@dataclass(frozen=True)
class StoredUnit:
    """A unit in the device's memory.

    Attributes:
        pages: The pages of its bytes, in order.
        holders: Instances that map it.
        filler: The holder whose load run copies its bytes; None once all of them are there.
        model: The model that used it last, to whose expected use its cost refers.
        offset: Its place in that model's segment: units of a model are reclaimed from the end.
        used_at: Monotonic seconds of its last reservation or release.
    """

    key: str
    nbytes: int
    pages: tuple[int, ...]
    holders: frozenset[str]
    filler: str | None = None
    model: str = ""
    offset: int = 0
    used_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.filler is None

    @property
    def is_reusable(self) -> bool:
        return self.is_complete and not self.holders


@dataclass(frozen=True)
class Store:
    """All pages of one device.

    Attributes:
        count: All pages.
        units: By key.
        lent: Pages by borrower.
        free: Free pages, in any order.
        has_runs: Engines map neighbouring pages together. False: each unit has memory of its own.
    """

    count: int
    units: Mapping[str, StoredUnit] = field(default_factory=dict)
    lent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    free: tuple[int, ...] = ()
    has_runs: bool = True

    @classmethod
    def empty(cls, count: int, *, has_runs: bool = True) -> Store:
        return cls(count, free=tuple(range(count - 1, -1, -1)), has_runs=has_runs)

    @cached_property
    def free_runs(self) -> tuple[Sequence[int], ...]:
        """Return the runs of neighbouring free pages, the shortest first.

        A reservation needs them several times, and sorting the pages takes most of its time.
        """
        return tuple(_runs(self.free))

    @property
    def mapped_pages(self) -> int:
        return sum(len(u.pages) for u in self.units.values() if not u.is_reusable)

    @property
    def reusable_pages(self) -> int:
        return sum(len(u.pages) for u in self.units.values() if u.is_reusable)

    @property
    def lent_pages(self) -> int:
        return sum(map(len, self.lent.values()))


@dataclass(frozen=True)
class Reservation:
    """The result of `reserve`.

    Attributes:
        store: The changed store.
        missing: Units that the caller has to fill, in order.
        reclaimed: Keys of units that were given up for them.
    """

    store: Store
    missing: tuple[Unit, ...]
    reclaimed: tuple[str, ...]


def keep_none(_: StoredUnit) -> bool:
    """Let every reusable unit be reclaimed."""
    return False


def missing_bytes(store: Store, units: Iterable[Unit]) -> int:
    """Return the bytes of `units` that a load would have to copy, each unit once."""
    absent = {u.key: u.nbytes for u in units if u.key not in store.units}
    return sum(absent.values())


def reserve(
    store: Store, holder: str, model: str, units: Sequence[Unit], now: float, cost: Cost, keep: Keep = keep_none
) -> Reservation | None:
    """Give `holder` all of `units`: those in the store as they are, pages for the others.

    Reusable units of least cost are reclaimed as needed, and if possible for `spared_pages` too. A
    unit that another holder's run is filling is shared, and is not in `missing`.

    Args:
        keep: True for units that are not reclaimed: pinned, or still mapped by a process.

    Returns:
        None if the pages do not suffice; the store is unchanged then.
    """
    wanted = {u.key: u for u in units}
    absent = {k: u for k, u in wanted.items() if k not in store.units}
    count = sum(u.pages for u in absent.values())
    cleared = _reclaim_for_units(store, count, lambda u: u.key in wanted or keep(u), cost)
    if cleared is None:
        return None
    store, reclaimed = cleared
    chosen = choose_pages(store.free_runs, count) if count else []
    taken, next_page = frozenset(chosen), iter(chosen)
    free = [page for page in store.free if page not in taken]
    stored = dict(store.units)
    for key, unit in wanted.items():
        if key in absent:
            pages = tuple(itertools.islice(next_page, unit.pages))
            stored[key] = StoredUnit(key, unit.nbytes, pages, frozenset({holder}), holder, model, unit.offset, now)
        else:
            before = stored[key]
            stored[key] = replace(before, holders=before.holders | {holder}, model=model, offset=unit.offset, used_at=now)
    return Reservation(replace(store, units=stored, free=tuple(free)), tuple(absent.values()), reclaimed)


def spared_pages(store: Store) -> int:
    """Return how many free pages units leave to KV caches, if units can be reclaimed instead.

    A KV cache returns single pages. Units that filled these holes would end in hundreds of runs.
    """
    if not store.has_runs:
        return 0
    short = sum(len(run) for run in store.free_runs if len(run) < SHORT_RUN_PAGES)
    return min(short, store.count // SPARED_PART)


def choose_pages(free_runs: Iterable[Sequence[int]], count: int) -> list[int]:
    """Choose `count` free pages in few runs of neighbours, so that they need few mappings.

    1. The shortest run that has all of them, its first pages.
    2. If none has, the longest run as a whole, then as before for the rest.

    Args:
        free_runs: Runs of at least `count` free pages, the shortest first (`Store.free_runs`).
    """
    runs = list(free_runs)
    chosen: list[int] = []
    while runs and count - len(chosen) > len(runs[-1]):
        chosen += runs.pop()
    if (rest := count - len(chosen)) > 0:
        chosen += next(run for run in runs if len(run) >= rest)[:rest]
    return chosen


def scattered_pages(free_runs: Iterable[Sequence[int]], count: int) -> list[int]:
    """Choose `count` free pages from the shortest runs, which are of least use to units.

    Args:
        free_runs: As of `Store.free_runs`.
    """
    return list(itertools.islice(itertools.chain.from_iterable(free_runs), count))


def _runs(free: Iterable[int]) -> list[list[int]]:
    """Return the runs of neighbouring pages, the shortest first."""
    ordered = sorted(free)
    cuts = [i for i, (a, b) in enumerate(itertools.pairwise(ordered), 1) if b - a != 1]
    return sorted((ordered[start:end] for start, end in itertools.pairwise((0, *cuts, len(ordered)))), key=len)


def settle(store: Store, key: str, content_key: str) -> Store:
    """Complete the unit `key` under the key of its content, which is known from its bytes now.

    If the store has that content already, the unit's holders share it, and its own pages are freed.
    """
    unit = store.units[key]
    others = {k: u for k, u in store.units.items() if k != key}
    present = others.get(content_key)
    if present is None:
        return replace(store, units={**others, content_key: replace(unit, key=content_key, filler=None)})
    shared = replace(present, holders=present.holders | unit.holders, model=unit.model, offset=unit.offset, used_at=unit.used_at)
    return replace(store, units={**others, content_key: shared}, free=(*store.free, *reversed(unit.pages)))


def share(store: Store, holder: str, model: str, unit: Unit, now: float) -> Store:
    """Give `holder` a unit that is here, by its content."""
    present = store.units[unit.key]
    shared = replace(present, holders=present.holders | {holder}, model=model, offset=unit.offset, used_at=now)
    return replace(store, units={**store.units, unit.key: shared})


def condemn(store: Store, key: str, number: int) -> Store:
    """Take a unit with wrong bytes out of use: no load gets it any more.

    Without holders it is freed; else it stays, under a key that no content has, for its holders.

    Args:
        number: Distinguishes condemned units of one key.
    """
    unit = store.units[key]
    others = {k: u for k, u in store.units.items() if k != key}
    if not unit.holders:
        return replace(store, units=others, free=(*store.free, *reversed(unit.pages)))
    damaged = f"{DAMAGED}{number}:{key}"
    return replace(store, units={**others, damaged: replace(unit, key=damaged)})


def complete(store: Store, keys: Iterable[str]) -> Store:
    """Mark units whose bytes are all there."""
    return replace(store, units={**store.units, **{k: replace(store.units[k], filler=None) for k in keys}})


def release(store: Store, holder: str, now: float) -> tuple[Store, Mapping[str, tuple[str, ...]]]:
    """Remove a holder that maps nothing any more.

    Complete units stay, reusable. Incomplete ones are freed, or handed to another of their holders.

    Returns:
        The changed store, and the keys of units that other holders' runs have to fill now.
    """
    stored, free = dict(store.units), list(store.free)
    handed: dict[str, tuple[str, ...]] = {}
    for key, unit in store.units.items():
        if holder not in unit.holders:
            continue
        left = unit.holders - {holder}
        if not left and (not unit.is_complete or key.startswith(DAMAGED)):
            del stored[key]
            free += reversed(unit.pages)
            continue
        filler = unit.filler
        if filler == holder:
            filler = min(left)
            handed[filler] = (*handed.get(filler, ()), key)
        stored[key] = replace(unit, holders=left, filler=filler, used_at=now)
    return replace(store, units=stored, free=tuple(free)), handed


def lend(store: Store, borrower: str, pages: int, cost: Cost, keep: Keep = keep_none) -> tuple[Store, tuple[str, ...]] | None:
    """Lend pages to a KV cache, in addition to what it has; reusable units are reclaimed as needed.

    Args:
        keep: True for units that are not reclaimed: pinned, or still mapped by a process.

    Returns:
        The changed store and the keys of reclaimed units; None if the pages do not suffice.
    """
    cleared = _reclaim(store, pages, keep, cost)
    if cleared is None:
        return None
    store, reclaimed = cleared
    granted = scattered_pages(store.free_runs, pages)
    taken = frozenset(granted)
    lent = {**store.lent, borrower: (*store.lent.get(borrower, ()), *granted)}
    return replace(store, lent=lent, free=tuple(page for page in store.free if page not in taken)), reclaimed


def lendable_pages(store: Store, wanted: int, keep: Keep = keep_none) -> int:
    """Return how many of `wanted` pages `lend` can lend."""
    found = len(store.free)
    for unit in store.units.values():
        if found >= wanted:
            break
        if unit.is_reusable and not keep(unit):
            found += len(unit.pages)
    return min(found, wanted)


def give_back(store: Store, borrower: str, pages: Iterable[int]) -> Store:
    """Take pages back from a borrower that unmapped them.

    Raises:
        ValueError: The borrower does not have one of them.
    """
    returned = frozenset(pages)
    had = store.lent.get(borrower, ())
    if not returned <= set(had):
        raise ValueError(f"{borrower} does not have pages {sorted(returned - set(had))}")
    kept = tuple(p for p in had if p not in returned)
    lent = {b: p for b, p in store.lent.items() if b != borrower} | ({borrower: kept} if kept else {})
    return replace(store, lent=lent, free=(*store.free, *sorted(returned, reverse=True)))


def give_up(store: Store, pages: int, cost: Cost, keep: Keep = keep_none) -> tuple[Store, tuple[str, ...]]:
    """Free at least `pages` pages of reusable units, or as many as there are.

    Args:
        keep: True for units that stay: pinned, or still mapped by a process.

    Returns:
        The changed store and the keys of the units.
    """
    return _free(store, len(store.free) + pages, keep, cost)


def _reclaim_for_units(store: Store, pages: int, keep: Keep, cost: Cost) -> tuple[Store, tuple[str, ...]] | None:
    """Reclaim as `_reclaim`, beside the pages that units spare if there are so many."""
    if pages and (spared := spared_pages(store)):
        cleared = _reclaim(store, pages + spared, keep, cost)
        if cleared is not None:
            return cleared
    return _reclaim(store, pages, keep, cost)


def _reclaim(store: Store, pages: int, keep: Keep, cost: Cost) -> tuple[Store, tuple[str, ...]] | None:
    """Free reusable units until `pages` pages are free; None if that is impossible."""
    if pages > len(store.free) + sum(len(u.pages) for u in store.units.values() if u.is_reusable):
        return None
    cleared = _free(store, pages, keep, cost)
    return cleared if len(cleared[0].free) >= pages else None


def _free(store: Store, pages: int, keep: Keep, cost: Cost) -> tuple[Store, tuple[str, ...]]:
    """Free reusable units until `pages` pages are free, or there is none.

    Units to `keep` are not reclaimed. Of equal cost the least recently used goes first, and of one
    model the unit nearest to its end: what remains is a prefix.
    """
    if len(store.free) >= pages:
        return store, ()
    stored, free = dict(store.units), list(store.free)
    reclaimed = []
    candidates = (u for u in store.units.values() if u.is_reusable)
    for unit in sorted(candidates, key=lambda u: (cost(u), u.used_at, u.model, -u.offset)):
        if len(free) >= pages:
            break
        if keep(unit):
            continue
        del stored[unit.key]
        free += reversed(unit.pages)
        reclaimed.append(unit.key)
    return replace(store, units=stored, free=tuple(free)), tuple(reclaimed)


def audit(store: Store) -> list[str]:
    """Return the violations of conservation (invariant 12); none in a correct store."""
    found = []
    owners: dict[int, list[str]] = {}
    for owner, pages in (
        ("free", store.free),
        *((f"unit {u.key}", u.pages) for u in store.units.values()),
        *((f"lent to {b}", p) for b, p in store.lent.items()),
    ):
        for page in pages:
            owners.setdefault(page, []).append(owner)
    found += [f"page {page}: {', '.join(who)}" for page, who in sorted(owners.items()) if len(who) > 1]
    found += [f"page {page} is beyond the pool's {store.count}" for page in sorted(owners) if not 0 <= page < store.count]
    found += [f"page {page} is nowhere" for page in range(store.count) if page not in owners]
    for unit in store.units.values():
        if len(unit.pages) != pages_of(unit.nbytes):
            found.append(f"unit {unit.key} of {unit.nbytes} bytes has {len(unit.pages)} pages")
        if unit.filler is not None and unit.filler not in unit.holders:
            found.append(f"unit {unit.key} is incomplete, and no holder's run fills it")
    return found
