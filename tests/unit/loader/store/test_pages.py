"""The store of pages: conservation after every event, and what is reclaimed first."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples
from weights.store.auditing import Snapshot, audit_records
from weights.store.pages import (
    DAMAGED,
    Reservation,
    Store,
    StoredUnit,
    audit,
    choose_pages,
    complete,
    condemn,
    give_back,
    lend,
    missing_bytes,
    release,
    reserve,
    scattered_pages,
    settle,
    spared_pages,
)
from weights.store.units import PAGE_BYTES, Unit

PAGES = 24


def unit(key: str, pages: int = 1, offset: int = 0) -> Unit:
    return Unit(key, offset, pages * PAGE_BYTES - 7)


def recency(stored: StoredUnit) -> float:
    return stored.used_at


def reserved(store: Store, holder: str, *units: Unit, now: float = 0.0, model: str = "m") -> Reservation:
    found = reserve(store, holder, model, units, now, recency)
    assert found is not None
    assert audit(found.store) == []
    return found


def loaded(store: Store, holder: str, *units: Unit, now: float = 0.0, model: str = "m") -> Store:
    found = reserved(store, holder, *units, now=now, model=model)
    return complete(found.store, [u.key for u in found.missing])


def test_free_pages_are_chosen_in_few_runs() -> None:
    free = Store(30, free=(9, 0, 1, 2, 20, 21, 22, 23, 24, 11, 12)).free_runs
    assert choose_pages(free, 2) == [11, 12], "the shortest run that has them"
    assert choose_pages(free, 4) == [20, 21, 22, 23]
    assert choose_pages(free, 7) == [20, 21, 22, 23, 24, 11, 12]
    assert sorted(choose_pages(free, 11)) == [0, 1, 2, 9, 11, 12, *range(20, 25)]
    assert choose_pages(free, 0) == choose_pages((), 0) == []
    assert scattered_pages(free, 4) == [9, 11, 12, 0], "KV caches get what is of least use to units"


def test_units_spare_the_holes_of_a_kv_cache_while_others_can_be_reclaimed() -> None:
    """A full pool of 256 pages, of which a KV cache has returned every other one of sixteen."""
    old, new = Unit("old", 0, 240 * PAGE_BYTES), Unit("new", 0, 8 * PAGE_BYTES)
    lent = lend(Store.empty(256), "kv", 16, recency)
    assert lent is not None
    full = reserve(lent[0], "a", "m", [Unit(f"u{n}", n * PAGE_BYTES, 8 * PAGE_BYTES) for n in range(30)], 1.0, recency)
    assert full is not None
    store, _ = release(complete(full.store, full.store.units), "a", 2.0)
    holes = lent[0].lent["kv"][::2]
    store = give_back(store, "kv", holes)
    assert (len(store.free), spared_pages(store)) == (8, 8)
    found = reserve(store, "b", "m", [new], 3.0, recency)
    assert found is not None
    pages = found.store.units["new"].pages
    assert pages == tuple(range(pages[0], pages[0] + 8)), "one run, and none of the holes"
    assert sorted(found.store.free) == sorted(holes)
    assert reserve(store, "b", "m", [old], 3.0, recency) is not None, "no page is spared if all are needed"
    mapped = reserve(store, "b", "m", [new], 3.0, recency, keep=lambda _: True)
    assert mapped is not None
    assert sorted(mapped.store.units["new"].pages) == sorted(holes), "nor if no unit can be reclaimed"
    on_gpu = reserve(replace(store, has_runs=False), "b", "m", [new], 3.0, recency)
    assert on_gpu is not None
    assert on_gpu.reclaimed == (), "each unit has memory of its own there"


def test_second_load_copies_only_missing_units() -> None:
    base, head = unit("base", 8), unit("head", 2)
    store, handed = release(loaded(Store.empty(PAGES), "a", base), "a", 1.0)
    assert handed == {}
    assert (store.mapped_pages, store.reusable_pages) == (0, 8)
    assert missing_bytes(store, [base, head, head]) == head.nbytes
    found = reserved(store, "b", base, head)
    assert [u.key for u in found.missing] == ["head"]
    assert found.store.units["base"].pages == store.units["base"].pages


def test_running_instances_share_units_and_are_charged_once() -> None:
    store = loaded(Store.empty(PAGES), "a", unit("base", 8))
    store = loaded(store, "b", unit("base", 8))
    assert store.mapped_pages == 8
    store, _ = release(store, "a", 1.0)
    assert (store.mapped_pages, store.reusable_pages) == (8, 0)


def test_mapped_units_are_never_reclaimed() -> None:
    store = loaded(Store.empty(PAGES), "a", unit("used", 20))
    assert reserve(store, "b", "m", [unit("new", 5)], 1.0, recency) is None
    assert lend(store, "kv", 5, recency) is None


def test_reclaim_takes_the_least_expected_cost_and_no_more_than_needed() -> None:
    store = Store.empty(PAGES)
    for key, at in (("cheap", 3.0), ("dear", 1.0), ("middle", 2.0)):
        store, _ = release(loaded(store, key, unit(key, 8), now=at), key, at)
    costs = {"cheap": 1.0, "middle": 2.0, "dear": 3.0}
    found = reserve(store, "b", "m", [unit("new", 10)], 4.0, lambda u: costs[u.key])
    assert found is not None
    assert found.reclaimed == ("cheap", "middle")
    assert audit(found.store) == []


def test_reclaim_starts_at_the_last_layers_of_a_model() -> None:
    layers = [unit(f"layer{n}", 4, offset=n * 100) for n in range(6)]
    store, _ = release(loaded(Store.empty(PAGES), "a", *layers), "a", 1.0)
    found = reserve(store, "b", "other", [unit("new", 6)], 2.0, lambda u: 1.0)
    assert found is not None
    assert found.reclaimed == ("layer5", "layer4")


def test_load_does_not_reclaim_units_it_will_reuse() -> None:
    store, _ = release(loaded(Store.empty(PAGES), "a", unit("base", 20)), "a", 1.0)
    assert reserve(store, "b", "m", [unit("base", 20), unit("more", 5)], 2.0, recency) is None
    assert missing_bytes(store, [unit("base", 20)]) == 0


def test_unit_being_filled_is_passed_to_another_holder_on_release() -> None:
    store = reserved(Store.empty(PAGES), "a", unit("base", 4)).store
    found = reserved(store, "b", unit("base", 4))
    assert found.missing == ()
    store, handed = release(found.store, "a", 1.0)
    assert handed == {"b": ("base",)}
    store, handed = release(store, "b", 2.0)
    assert (handed, store.units, len(store.free)) == ({}, {}, PAGES)


def test_borrower_cannot_return_pages_it_does_not_have() -> None:
    lent = lend(Store.empty(PAGES), "kv", 2, recency)
    assert lent is not None
    with pytest.raises(ValueError, match="does not have pages"):
        give_back(lent[0], "other", lent[0].lent["kv"])


def test_the_audit_finds_each_kind_of_damage() -> None:
    store = Store(3, units={"u": StoredUnit("u", PAGE_BYTES + 1, (0,), frozenset(), filler="gone")}, lent={"kv": (0, 7)}, free=(1,))
    assert audit(store) == [
        "page 0: unit u, lent to kv",
        "page 7 is beyond the pool's 3",
        "page 2 is nowhere",
        f"unit u of {PAGE_BYTES + 1} bytes has 1 pages",
        "unit u is incomplete, and no holder's run fills it",
    ]


MODELS = {
    "base": [unit("b0", 3), unit("b1", 2, 100), unit("b2", 4, 200)],
    "tuned": [unit("b0", 3), unit("b1", 2, 100), unit("t2", 4, 200)],
    "other": [unit("o0", 5), unit("o1", 5, 100)],
}


class StoreMachine(RuleBasedStateMachine):
    """Whole histories: loads with and without known hashes, failures, damage, and KV caches."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store.empty(PAGES)
        self.holders: dict[str, dict[str, str]] = {}
        """By holder: the key in the store of each unit's content."""
        self.to_fill: dict[str, set[str]] = {}
        """By holder: contents that its run has to bring."""
        self.numbers = count()
        self.now = 0.0

    @rule(model=st.sampled_from(sorted(MODELS)), hashed=st.booleans(), data=st.data())
    def reserve(self, model: str, hashed: bool, data: st.DataObject) -> None:
        self.now += 1
        holder = f"i{next(self.numbers)}"
        before = self.store
        keys = {u.key: u.key if hashed else f"filling:{holder}:{u.key}" for u in MODELS[model]}
        units = [replace(u, key=keys[u.key]) for u in MODELS[model]]
        keep = data.draw(st.sets(st.sampled_from(sorted(before.units)))) if before.units else set()
        found = reserve(before, holder, model, units, self.now, recency, lambda u: u.key in keep)
        wanted = {u.key for u in units}
        fits = sum(u.pages for u in units if u.key not in before.units) <= len(before.free) + sum(
            len(s.pages) for s in before.units.values() if s.is_reusable and s.key not in wanted | keep
        )
        assert (found is not None) == fits
        if found is None:
            return
        self.store = found.store
        self.holders[holder] = keys
        missing = {u.key for u in found.missing}
        assert missing == wanted - before.units.keys()
        self.to_fill[holder] = {content for content, key in keys.items() if key in missing}
        self._are_reclaimable(before, found.reclaimed)
        assert keep.isdisjoint(found.reclaimed)
        for key in before.units.keys() & found.store.units.keys():
            assert before.units[key].pages == found.store.units[key].pages, "no byte moves"

    def _are_reclaimable(self, before: Store, reclaimed: tuple[str, ...]) -> None:
        assert all(before.units[key].is_reusable for key in reclaimed)

    @precondition(lambda self: any(self.to_fill.values()))
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A unit's bytes are there: it is known by its content from now on."""
        holder = data.draw(st.sampled_from(sorted(h for h, contents in self.to_fill.items() if contents)))
        content = data.draw(st.sampled_from(sorted(self.to_fill[holder])))
        self.to_fill[holder].remove(content)
        key = self.holders[holder][content]
        if key == content:
            self.store = complete(self.store, [key])
            return
        before = self.store
        self.store = settle(before, key, content)
        self.holders[holder][content] = content
        shared = content in before.units
        assert len(self.store.free) - len(before.free) == (len(before.units[key].pages) if shared else 0)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """An instance ends, or is killed, at any point of its load."""
        self.now += 1
        holder = data.draw(st.sampled_from(sorted(self.holders)))
        keys = self.holders.pop(holder)
        orphaned = {keys[content] for content in self.to_fill.pop(holder)}
        self.store, handed = release(self.store, holder, self.now)
        assert {k for handed_keys in handed.values() for k in handed_keys} == {k for k in orphaned if k in self.store.units}
        for other, handed_keys in handed.items():
            self.to_fill[other].update(handed_keys)

    @precondition(lambda self: any(self._sound()))
    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        """The bytes of a complete unit turn out to be wrong."""
        key = data.draw(st.sampled_from(sorted(self._sound())))
        number = next(self.numbers)
        holders, pages = self.store.units[key].holders, self.store.units[key].pages
        self.store = condemn(self.store, key, number)
        assert key not in self.store.units, "no load gets it any more"
        if not holders:
            assert set(pages) <= set(self.store.free)
        for holder in holders:
            keys = self.holders[holder]
            [content] = [c for c, k in keys.items() if k == key]
            keys[content] = f"{DAMAGED}{number}:{key}"

    def _sound(self) -> list[str]:
        return [k for k, u in self.store.units.items() if u.is_complete and not k.startswith(DAMAGED)]

    @rule(borrower=st.sampled_from(("kv1", "kv2")), pages=st.integers(1, 6))
    def lend(self, borrower: str, pages: int) -> None:
        before = self.store
        lent = lend(before, borrower, pages, recency)
        assert (lent is not None) == (pages <= len(before.free) + before.reusable_pages)
        if lent is not None:
            assert lent[0].lent_pages == before.lent_pages + pages
            self._are_reclaimable(before, lent[1])
            self.store = lent[0]

    @precondition(lambda self: self.store.lent)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        borrower = data.draw(st.sampled_from(sorted(self.store.lent)))
        pages = data.draw(st.sets(st.sampled_from(self.store.lent[borrower]), min_size=1))
        self.store = give_back(self.store, borrower, pages)

    @invariant()
    def is_conserved(self) -> None:
        store = self.store
        assert audit(store) == []
        assert len(store.free) + store.mapped_pages + store.reusable_pages + store.lent_pages == PAGES
        assert audit_records(Snapshot("d", store, frozenset(self.holders), frozenset())) == []

    @invariant()
    def holders_have_all_their_units(self) -> None:
        for holder, keys in self.holders.items():
            assert all(holder in self.store.units[key].holders for key in keys.values())

    def teardown(self) -> None:
        """Once all have ended, everything is free or reusable."""
        for holder in sorted(self.holders):
            self.store, _ = release(self.store, holder, self.now)
        for borrower, pages in tuple(self.store.lent.items()):
            self.store = give_back(self.store, borrower, pages)
        assert len(self.store.free) + self.store.reusable_pages == PAGES
        assert not any(k.startswith((DAMAGED, "filling:")) for k in self.store.units)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
