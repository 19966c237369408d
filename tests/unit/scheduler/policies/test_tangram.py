"""Tangram: affinity, eviction by cost, and packing against exhaustive search."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.policies.port import Ask, Clearance, Resident
from simulator.policies import tangram
from simulator.policies.tangram_packing import Packing, Region, evict, merge_all, pack
from tests.unit.scheduler.policies.views import ask, device, option


def test_each_request_takes_the_free_device_that_loads_least() -> None:
    """Requests in order take the device that loads least; each device is taken once.

    Both prefer g0; the first gets it, the second g1, the third finds none.
    """
    asks = [Ask("a", 1, 0.0), Ask("b", 1, 0.0), Ask("c", 1, 0.0)]
    options = {
        "a": [option("n/g0", 1.0), option("n/g1", 2.0)],
        "b": [option("n/g0", 0.1), option("n/g1", 3.0)],
        "c": [option("n/g0", 0.2)],
    }
    assert tangram.schedule(asks, options) == [(asks[0], options["a"][0]), (asks[1], options["b"][1])]


def test_victims_are_ordered_by_miss_cost_and_active_models_are_exempt() -> None:
    def weights(key: str, miss: float, reload_s: float, sensitivity: float = 1.0, state: str = "weights") -> Resident:
        return Resident(key, key, 10, state, miss_probability=miss, reload_s=reload_s, sensitivity=sensitivity)  # type: ignore[arg-type]  # a literal

    view = device(
        "n/g0",
        weights("dear", 0.9, 10.0),
        weights("likely", 0.9, 1.0),
        weights("unlikely", 0.1, 5.0),
        weights("patient", 0.9, 2.0, sensitivity=0.1),
        weights("active", 0.0, 0.0, state="serving"),
    )
    found = tangram.clear(ask(), view, 30, 0.0)
    assert found is not None
    assert found.victims == ("patient", "unlikely", "likely")
    assert abs(found.penalty_s - (0.18 + 0.5 + 0.9)) < 1e-9
    assert tangram.clear(ask(), view, 41, 0.0) is None
    assert tangram.clear(ask(), device("n/g0"), 0, 0.0) == Clearance("evict")


def test_packing_of_the_papers_example_has_merge_cost_one() -> None:
    """The paper's example ends with a merge cost of one.

    Fig. 6: allocated 1 and 3 of 12, so that merging all costs 4; split at the 3 (gain 3), the left
    half still has to move the 1.
    """
    regions = [Region(2), Region(1, "x"), Region(2), Region(3, "y"), Region(4)]
    tensors = {"large": 4, "small": 4}
    assert merge_all(regions, tensors) == Packing({"large": 4, "small": 8}, {"x": 0, "y": 1}, 4, 4)
    found = pack(regions, tensors)
    assert found is not None
    assert (found.moved, found.bound) == (1, 1)
    assert found.places == {"large": 0, "small": 8} or set(found.places.values()) == {1, 8}


def test_fitting_tensors_move_nothing_and_none_crosses_a_fixed_region() -> None:
    regions = [Region(4), Region(2, "x"), Region(6)]
    found = pack(regions, {"a": 6, "b": 4})
    assert found == Packing({"a": 6, "b": 0}, {}, 0, 0)
    fixed = [Region(4), Region(2, "kv", fixed=True), Region(4)]
    assert pack(fixed, {"a": 5}) is None
    assert pack([Region(4), Region(2, "x"), Region(4)], {"a": 5}) is not None


def test_region_eviction_stops_at_enough_space_and_joins_free_regions() -> None:
    regions = [Region(2), Region(3, "cheap", cost=0.1), Region(1), Region(5, "dear", cost=9.0), Region(2, "kv", fixed=True)]
    assert evict(regions, 3) == regions
    assert evict(regions, 6) == [Region(6), Region(5, "dear", cost=9.0), Region(2, "kv", fixed=True)]
    assert evict(regions, 12) is None


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Region], dict[str, int]]:
    regions = []
    for n in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["free", "free", "movable", "movable", "fixed"]))
        regions.append(Region(draw(st.integers(1, 4)), "" if kind == "free" else f"t{n}", kind == "fixed"))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return regions, {f"new{n}": s for n, s in enumerate(sizes)}


def gaps(regions: list[Region], moving: set[str]) -> list[int]:
    """Return contiguous bytes between the regions that stay."""
    found = [0]
    for r in regions:
        if r.key and r.key not in moving:
            found.append(0)
        else:
            found[-1] += r.size
    return found


def fits(sizes: list[int], holes: list[int]) -> bool:
    """Return whether contiguous pieces fit into holes, by trying every order."""
    for order in permutations(sizes):
        left = list(holes)
        if all(_first_fit(left, size) for size in order):
            return True
    return False


def _first_fit(left: list[int], size: int) -> bool:
    n = next((n for n, hole in enumerate(left) if hole >= size), None)
    if n is None:
        return False
    left[n] -= size
    return True


def least_moved(regions: list[Region], tensors: dict[str, int]) -> int | None:
    """Return the least bytes moved, over every set of regions, to any place."""
    movable = {r.key: r.size for r in regions if r.movable}
    sets = [set(c) for k in range(len(movable) + 1) for c in combinations(sorted(movable), k)]
    costs = [sum(movable[k] for k in s) for s in sets if fits([*tensors.values(), *(movable[k] for k in s)], gaps(regions, s))]
    return min(costs, default=None)


@settings(deadline=None)
@given(pools())
def test_packing_is_valid_and_costs_between_the_least_possible_and_merging_all(pool: tuple[list[Region], dict[str, int]]) -> None:
    regions, tensors = pool
    found, worst, best = pack(regions, tensors), merge_all(regions, tensors), least_moved(regions, tensors)
    assert (found is None) == (worst is None)
    if found is None or worst is None:
        return
    assert best is not None
    assert best <= found.moved <= found.bound <= sum(r.size for r in regions if r.movable)
    assert found.moved <= worst.bound
    _check_layout(regions, tensors, found)
    _check_layout(regions, tensors, worst)


def _check_layout(regions: list[Region], tensors: dict[str, int], found: Packing) -> None:
    """Check that no regions overlap, and that fixed ones stay."""
    offset, extents = 0, []
    for r in regions:
        if r.key:
            assert not (r.fixed and r.key in found.moves)
            at = found.moves.get(r.key, offset)
            extents.append((at, at + r.size))
        offset += r.size
    assert set(found.places) == set(tensors)
    extents += [(at, at + tensors[k]) for k, at in found.places.items()]
    extents.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(extents))
    assert extents[0][0] >= 0
    assert extents[-1][1] <= offset
