"""Torpor: Algorithm 1, eviction, the SLO queue and alpha."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.policies.port import Ask, Clearance, Resident, Usage
from services.scheduler.domain.policies.torpor_queue import (
    FLOOR,
    compliant_ratio,
    high_priority,
    next_alpha,
    order,
    required_requests,
)
from simulator.policies import torpor
from tests.unit.scheduler.policies.views import ask, device, option


def test_free_device_with_the_model_is_preferred_over_any_swap() -> None:
    here = option("n/g3", way="ready", seconds=9.0)
    others = [option("n/g0", way="load", seconds=0.1), option("n/g1", way="peer_copy", seconds=0.1)]
    assert torpor.choose(ask(), [*others, here], "") == here


def test_devices_with_the_model_are_chosen_with_equal_probability() -> None:
    options = [option(f"n/g{n}", way="ready") for n in range(3)]
    drawn = [torpor.choose(ask(), options, f"plan {n}") for n in range(300)]
    assert all(70 < drawn.count(o) < 130 for o in options)


def test_model_on_busy_devices_is_copied_over_the_fastest_link() -> None:
    busy = option("n/g0", way="ready", running=1)
    slow, fast = option("n/g1", way="peer_copy", seconds=0.4), option("n/g2", way="peer_copy", seconds=0.2)
    from_host = option("n/g3", way="load", seconds=0.1)
    assert torpor.choose(ask(), [busy, slow, fast, from_host], "") == fast


@pytest.mark.parametrize(
    ("neighbours", "chosen"),
    [
        (("heavy", "light", "none"), 2),
        (("heavy", "light", "light"), 1),
        (("heavy", "heavy", "heavy"), 0),
        (("light", "heavy", "heavy"), 0),
    ],
)
def test_from_host_the_neighbour_decides(neighbours: tuple[str, ...], chosen: int) -> None:
    """From host memory, a device is chosen by its neighbour.

    A quiet neighbour is first, then one that loads a light model, then any.
    """
    options = [option(f"n/g{n}", seconds=5.0 - n, neighbour_loads=k) for n, k in enumerate(neighbours)]
    assert torpor.choose(ask(), options, "") == options[chosen]


def test_request_is_queued_while_every_device_executes() -> None:
    assert torpor.choose(ask(), [option("n/g0", way="ready", running=1), option("n/g1", running=1)], "") is None


def resident(key: str, **more: object) -> Resident:
    return Resident(key, model=key, nbytes=10, state="idle", **more)  # type: ignore[arg-type]  # the test's own keywords


def test_victims_are_second_replicas_then_light_models_then_least_recent_heavy_ones() -> None:
    view = device(
        "n/g0",
        resident("heavy-old", is_heavy=True, last_used=1.0, reload_s=2.0),
        resident("heavy-new", is_heavy=True, last_used=5.0, reload_s=3.0),
        resident("light", last_used=9.0, reload_s=1.0),
        resident("twice", is_heavy=True, last_used=9.0, reload_s=4.0, replicas=2),
    )
    assert torpor.clear(ask(), view, 40, 0.0) == Clearance("evict", ("twice", "light", "heavy-old", "heavy-new"), 40, penalty_s=5.0)
    assert torpor.clear(ask(), view, 20, 0.0) == Clearance("evict", ("twice", "light"), 20)
    assert torpor.clear(ask(), view, 41, 0.0) is None


def test_rrc_is_the_number_of_requests_still_to_be_served_in_time() -> None:
    """RRC is the number of requests still to be served in time.

    p = 0.98, 100 requests, 95 in time: (98 - 95) / 0.02 = 150; and 150 more in time make exactly
    98 %.
    """
    usage = Usage("f", 100, 95)
    assert required_requests(usage) == pytest.approx(150)
    assert required_requests(Usage("f", 250, 245)) == pytest.approx(0)
    assert required_requests(Usage("f", 100, 100)) == pytest.approx(-100)


def book(*needed: float) -> dict[str, Usage]:
    """Return functions with these RRCs (p = 0.5, so that RRC is n - 2m)."""
    made = {}
    for n, rrc in enumerate(needed):
        total = 100
        made[f"f{n}"] = Usage(f"f{n}", total, int((total - rrc) / 2), 0.5)
    return made


def test_high_priority_set_is_the_largest_k_within_alpha_of_the_total() -> None:
    """The largest k whose sum is within alpha of the total has high priority.

    RRCs are 0, 10, 20, 30, 60 in total. Half is 30: the first three; a sixth is 10: two; zero:
    those that comply.
    """
    b = book(-4, 10, 20, 30)
    assert high_priority(b, 0.5) == {"f0", "f1", "f2"}
    assert high_priority(b, 1 / 6) == {"f0", "f1"}
    assert high_priority(b, 0.0) == {"f0"}
    assert high_priority(b, 1.0) == set(b)


def test_high_priority_orders_by_least_compliant_and_low_priority_by_nearest() -> None:
    asks = [Ask(m, 1, waited_s=0.0, request_id=m) for m in ("f0", "f1", "f2", "f3", "f4")]
    ordered = order(asks, book(-4, 10, 20, 30, 40), 0.3)
    assert [a.model for a in ordered] == ["f2", "f1", "f0", "f3", "f4"]


def test_longest_waiting_request_leads_its_function_and_unknown_functions_are_high() -> None:
    asks = [Ask("f1", 1, waited_s=1.0), Ask("f1", 1, waited_s=2.0), Ask("new", 1, waited_s=0.0)]
    ordered = order(asks, book(50, 60), 0.1)
    assert [(a.model, a.waited_s) for a in ordered] == [("new", 0.0), ("f1", 2.0), ("f1", 1.0)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_higher_alpha_never_removes_high_priority(counts: list[tuple[int, int]], one: float, other: float) -> None:
    b = {f"f{n}": Usage(f"f{n}", total, min(total, met)) for n, (total, met) in enumerate(counts)}
    assert high_priority(b, min(one, other)) <= high_priority(b, max(one, other))


def test_alpha_doubles_and_halves_beyond_the_threshold_and_never_vanishes() -> None:
    assert next_alpha(0.25, 0.5, 0.55) == 0.5
    assert next_alpha(0.75, 0.5, 0.55) == 1.0
    assert next_alpha(0.5, 0.55, 0.5) == 0.25
    assert next_alpha(0.5, 0.5, 0.53) == 0.5
    assert next_alpha(FLOOR, 0.9, 0.1) == FLOOR
    assert compliant_ratio([Usage("a", 100, 98), Usage("b", 100, 97)]) == 0.5
