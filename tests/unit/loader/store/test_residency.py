"""Units of weights that a device has, and bytes that a load would copy."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from weights.store.cost import LEAST_LIKELY, expected_loads, reload_cost
from weights.store.pages import Store, complete, missing_bytes, release, reserve
from weights.store.residency import KnownUnits, LoadingWeights, ResidentWeights, residency
from weights.store.units import PAGE_BYTES, Unit

HALF = PAGE_BYTES // 2


def units(*names: str, nbytes: int = HALF) -> tuple[Unit, ...]:
    return tuple(Unit(f"sha256:{n}", i * PAGE_BYTES, nbytes) for i, n in enumerate(names))


def known(**weights: str) -> KnownUnits:
    """Weights by name; each letter is a unit."""
    found = KnownUnits()
    for name, letters in weights.items():
        found.learn(name, units(*letters), {})
    return found


def hold(store: Store, name: str, letters: str) -> Store:
    found = reserve(store, name, name, units(*letters), 0.0, lambda _: 0.0)
    assert found is not None
    return complete(found.store, [u.key for u in found.missing])


def only(rows: Iterable[ResidentWeights], name: str) -> ResidentWeights:
    return next(r for r in rows if r.weights_id == name)


def loading(name: str, letters: str) -> LoadingWeights:
    return LoadingWeights(name, frozenset(u.key for u in units(*letters)), 0)


def test_reusable_units_are_present_but_not_mapped() -> None:
    store, _ = release(hold(Store.empty(8), "a", "xyz"), "a", 1.0)
    [row] = residency(store, known(a="xyz"))
    assert row == ResidentWeights("a", 3 * HALF, 0, 0, 3 * PAGE_BYTES, 0)


def test_weights_that_share_units_miss_only_the_others() -> None:
    found = residency(hold(Store.empty(8), "a", "xyz"), known(a="xyz", tuned="xyq"), [loading("a", "xyz")])
    assert only(found, "tuned") == ResidentWeights("tuned", 3 * HALF, HALF, HALF, PAGE_BYTES, 0)
    base = only(found, "a")
    assert (base.missing_bytes, base.unmapped_bytes, base.exclusive_bytes) == (0, 0, PAGE_BYTES)


def test_weights_without_a_unit_on_the_device_are_left_out() -> None:
    assert [r.weights_id for r in residency(hold(Store.empty(8), "a", "x"), known(a="x", b="y"))] == ["a"]


def test_a_unit_that_occurs_twice_in_the_weights_counts_once() -> None:
    [row] = residency(hold(Store.empty(8), "a", "xxy"), known(a="xxy"))
    assert (row.total_bytes, row.missing_bytes) == (2 * HALF, 0)


def test_a_first_load_without_known_hashes_is_reported_by_its_holder() -> None:
    store = reserve(Store.empty(8), "a", "a", units("x", "y"), 0.0, lambda _: 0.0)
    assert store is not None
    held = LoadingWeights("a", frozenset(u.key for u in units("x", "y")), 2 * HALF)
    [row] = residency(store.store, KnownUnits(), [held])
    assert (row.missing_bytes, row.unmapped_bytes, row.exclusive_bytes) == (2 * HALF, 0, 2 * PAGE_BYTES)


def test_computed_hashes_replace_those_of_an_index_and_not_the_reverse() -> None:
    found = KnownUnits()
    found.suppose("a", units("x"))
    found.learn("a", units("y"), {"t": "y"})
    found.suppose("a", units("x"))
    assert (found.users("sha256:x"), found.users("sha256:y")) == (frozenset[str](), frozenset({"a"}))
    assert found.digests("a") == {"t": "y"}


_LETTERS = st.text("pqrst", min_size=1, max_size=4)


@given(st.dictionaries(st.sampled_from("abc"), _LETTERS, min_size=1), st.sets(st.sampled_from("abc")))
def test_any_report_bounds_the_pages_of_any_set_of_instances(weights: dict[str, str], running: set[str]) -> None:
    """Mapped pages and the unmapped ones of further weights cover all their units."""
    store, known_units = Store.empty(64), known(**weights)
    for name in weights:
        store = hold(store, name, weights[name])
    for name in set(weights) - running:
        store, _ = release(store, name, 1.0)
    held = [loading(n, weights[n]) for n in sorted(running & weights.keys())]
    rows = {r.weights_id: r for r in residency(store, known_units, held)}
    for chosen in (set(weights), running & weights.keys(), set(weights) - running):
        pages = len(set("".join(weights[n] for n in chosen))) * PAGE_BYTES
        gone = running & weights.keys() - chosen
        bound = (
            store.mapped_pages * PAGE_BYTES
            - sum(rows[n].exclusive_bytes for n in gone)
            + sum(rows[n].unmapped_bytes for n in chosen)
        )
        assert pages <= bound
    for name, letters in weights.items():
        assert rows[name].missing_bytes == missing_bytes(store, units(*letters))


def test_likelier_units_cost_more_to_reload_and_shared_ones_most() -> None:
    store = hold(Store.empty(8), "a", "x")
    store = hold(store, "b", "y")
    store = hold(store, "c", "z")
    store = hold(store, "d", "s")
    users = known(a="x", b="y", c="z", d="s", e="s").users
    cost = reload_cost(lambda _: "ssd", expected_loads({"a": 0.5, "b": 0.1, "d": 0.4, "e": 0.4}, users))
    ranked = sorted(store.units.values(), key=cost)
    assert [u.model for u in ranked] == ["c", "b", "a", "d"]
    assert cost(ranked[0]) > 0 < LEAST_LIKELY


def test_units_without_expected_demand_are_ordered_by_bytes_and_tier() -> None:
    found = reserve(Store.empty(8), "m", "m", [*units("x"), Unit("sha256:big", PAGE_BYTES, PAGE_BYTES)], 0.0, lambda _: 0.0)
    assert found is not None
    small, big = (found.store.units[k] for k in ("sha256:x", "sha256:big"))
    cost = reload_cost(lambda _: "ssd", expected_loads({}, known().users))
    assert cost(small) < cost(big)
    assert cost(small) == cost(small)


def test_equal_costs_are_reclaimed_least_recently_used_first() -> None:
    store = Store.empty(2)
    for now, (name, letters) in enumerate((("a", "x"), ("b", "y"))):
        found = reserve(store, name, name, units(*letters), float(now), lambda _: 0.0)
        assert found is not None
        store, _ = release(complete(found.store, [found.missing[0].key]), name, 10.0 - now)
    cost = reload_cost(lambda _: "ssd", expected_loads({"a": 0.2, "b": 0.2}, known(a="x", b="y").users))
    next_load = reserve(store, "c", "c", units("z"), 20.0, cost)
    assert next_load is not None
    assert next_load.reclaimed == ("sha256:y",)
