"""The order in which models share a device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.standings import Standings
from services.engine.domain.step_order import LEAD_S, WEIGHT, Lane, Priorities, Turn, admit, charge, next_turn, update_priorities
from shared.compliance import FIRST_ALPHA, PERIOD_S, required_requests
from shared.contracts.objectives import ObjectiveStanding


def test_lane_with_least_compute_time_goes_first() -> None:
    assert next_turn([Lane("a", 2.0), Lane("b", 1.0), Lane("c", 3.0)], now=0.0).lane.name == "b"


def test_earliest_deadline_goes_before_lanes_without_one() -> None:
    lanes = [Lane("none", 0.0), Lane("late", 0.1, deadline=9.0), Lane("soon", 0.2, deadline=5.0)]
    assert next_turn(lanes, now=1.0).lane.name == "soon"


def test_deadline_that_has_passed_gives_no_precedence() -> None:
    assert next_turn([Lane("fair", 0.0), Lane("missed", 0.1, deadline=5.0)], now=5.1).lane.name == "fair"


def test_deadlines_do_not_take_more_than_the_lead() -> None:
    assert next_turn([Lane("fair", 1.0), Lane("urgent", 1.0 + LEAD_S, deadline=9.0)], now=0.0).lane.name == "urgent"
    assert next_turn([Lane("fair", 1.0), Lane("urgent", 1.01 + LEAD_S, deadline=9.0)], now=0.0).lane.name == "fair"


def test_idle_time_is_not_saved_up() -> None:
    busy = [Lane("b", 7.0), Lane("c", 8.0)]
    assert admit(Lane("a", 1.0), busy, 7.5).tag_s == 7.0
    assert admit(Lane("a", 1.0), [], 7.5).tag_s == 7.5
    assert admit(Lane("a", 9.0), busy, 7.5).tag_s == 9.0


@given(
    durations=st.lists(st.floats(0.001, 2.0), min_size=2, max_size=6),
    with_deadline=st.lists(st.booleans(), min_size=6, max_size=6),
    required=st.lists(st.floats(-50, 50), min_size=6, max_size=6),
    low=st.lists(st.booleans(), min_size=6, max_size=6),
    steps=st.integers(1, 120),
)
def test_busy_lane_waits_for_a_bounded_compute_time_of_each_other(
    durations: list[float], with_deadline: list[bool], required: list[float], low: list[bool], steps: int
) -> None:
    """All lanes are always busy, with any step lengths, deadlines and priorities."""
    lanes = {
        f"{i}": Lane(f"{i}", deadline=1e9 if with_deadline[i] else None, required=required[i], is_low=low[i])
        for i in range(len(durations))
    }
    waited = {(one, other): 0.0 for one in lanes for other in lanes}
    for _ in range(steps):
        turn = next_turn(lanes.values(), now=0.0)
        name, took = turn.lane.name, durations[int(turn.lane.name)]
        lanes[name] = charge(lanes[name], took, has_precedence=turn.has_precedence)
        for one in lanes:
            waited[one, name] += took
            waited[name, one] = 0.0
        for (one, other), seconds in waited.items():
            assert seconds <= WEIGHT * (durations[int(one)] + LEAD_S) + 2 * durations[int(other)] + 1e-9


def test_model_that_needs_most_requests_goes_first_unless_it_has_low_priority() -> None:
    lanes = [
        Lane("complies", deadline=1.0, required=-3.0),
        Lane("nearly", deadline=9.0, required=2.0),
        Lane("hopeless", deadline=1.0, required=80.0, is_low=True),
    ]
    assert next_turn(lanes, now=0.0) == Turn(lanes[1], has_precedence=True)
    assert next_turn([lanes[0], lanes[2]], now=0.0).lane.name == "complies"
    assert next_turn([replace(lanes[0], tag_s=0.1), replace(lanes[2], deadline=None)], now=2.0).lane.name == "hopeless"


def test_step_with_precedence_is_charged_less() -> None:
    assert charge(Lane("a", 1.0), 2.0).tag_s == 3.0
    assert charge(Lane("a", 1.0), 2.0, has_precedence=True).tag_s == 1.0 + 2.0 / WEIGHT


def test_priorities_follow_the_share_of_models_that_comply() -> None:
    required = {"a": -1.0, "b": 1.0, "c": 5.0}
    first = update_priorities(Priorities(), required, now=100.0)
    assert first == Priorities(FIRST_ALPHA, 1.0, 100.0, frozenset({"c"}))
    fell = update_priorities(first, required, now=100.0 + PERIOD_S)
    assert fell.alpha == FIRST_ALPHA / 2
    assert update_priorities(fell, required, now=101.0 + PERIOD_S) == fell
    rose = update_priorities(fell, dict.fromkeys(required, 0.0), now=100.0 + 2 * PERIOD_S)
    assert (rose.alpha, rose.low) == (FIRST_ALPHA, frozenset())
    assert update_priorities(first, {}, now=200.0).low == frozenset(), "no model has counts"


@dataclass
class Simulated:
    """Requests that met the objective, and all, by model."""

    met: Counter[str]
    total: Counter[str]
    longest_wait_s: float


def simulate(policy: str, seed: int, load: float, seconds: float = 60.0) -> Simulated:
    """Simulate a device whose models get more requests than it can compute.

    A request takes four steps of 20 ms, and should end within 0.5 s.

    Args:
        policy: fifo (earliest arrival first), edf (deadlines without counts) or rrc.
        load: The compute time of all requests, in multiples of the device's.
    """
    random, step_s, steps, within_s, percentile = Random(seed), 0.02, 4, 0.5, 0.8
    shares = [random.uniform(0.5, 1.5) for _ in range(12)]
    arrivals: list[tuple[float, str]] = []
    for number, share in enumerate(shares):
        at, rate = 0.0, share / sum(shares) * load / (step_s * steps)
        while (at := at + random.expovariate(rate)) < seconds:
            arrivals.append((at, f"m{number}"))
    arrivals.sort(reverse=True)
    found = Simulated(Counter(), Counter(), 0.0)
    lanes = {f"m{number}": Lane(f"m{number}") for number in range(len(shares))}
    queues: dict[str, list[list[float]]] = {name: [] for name in lanes}
    served, priorities, now = dict.fromkeys(lanes, 0.0), Priorities(), 0.0
    while now < seconds:
        while arrivals and arrivals[-1][0] <= now:
            at, name = arrivals.pop()
            if not queues[name]:
                others = [lanes[other] for other, queue in queues.items() if queue]
                lanes[name], served[name] = admit(lanes[name], others, max(lane.tag_s for lane in lanes.values())), now
            queues[name].append([at, steps])
        busy = [name for name, queue in queues.items() if queue]
        if not busy:
            now = arrivals[-1][0] if arrivals else seconds
            continue
        required = {n: required_requests(found.total[n], found.met[n], percentile) for n in lanes if found.total[n]}
        priorities = update_priorities(priorities, required if policy == "rrc" else {}, now)
        views = []
        for name in busy:
            deadline = min((at + within_s for at, _ in queues[name] if at + within_s >= now), default=None)
            needed = required.get(name, 0.0) if policy == "rrc" else 0.0
            views.append(replace(lanes[name], deadline=deadline, required=needed, is_low=name in priorities.low))
        first = min(views, key=lambda lane: queues[lane.name][0][0])
        turn = next_turn(views, now) if policy != "fifo" else Turn(first)
        name = turn.lane.name
        found.longest_wait_s = max(found.longest_wait_s, now - served[name])
        now += step_s
        served[name] = now
        lanes[name] = charge(lanes[name], step_s, has_precedence=turn.has_precedence)
        request = queues[name][0]
        request[1] -= 1
        if not request[1]:
            found.total[name] += 1
            found.met[name] += now - request[0] <= within_s
            queues[name].pop(0)
    return found


def test_under_overload_more_models_meet_their_objective_than_by_deadlines_or_arrival() -> None:
    """At 1.5 times the capacity; all policies get the same requests."""
    shares: dict[str, float] = {}
    for policy in ("fifo", "edf", "rrc"):
        runs = [simulate(policy, seed, load=1.5) for seed in range(3)]
        shares[policy] = sum(sum(run.met.values()) for run in runs) / sum(sum(run.total.values()) for run in runs)
        assert policy == "fifo" or all(len(run.total) == 12 for run in runs), "each model is served"
        assert policy == "fifo" or max(run.longest_wait_s for run in runs) < 12 * WEIGHT * LEAD_S
    assert shares["rrc"] > 2 * max(shares["fifo"], shares["edf"]), shares


@given(st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(0, 10))), min_size=1, max_size=8), st.floats(0, 10))
def test_choice_does_not_depend_on_the_order_of_the_lanes(found: list[tuple[float, float | None]], now: float) -> None:
    lanes = [Lane(f"{i}", tag, deadline) for i, (tag, deadline) in enumerate(found)]
    assert next_turn(lanes, now) == next_turn(lanes[::-1], now)


def test_standing_is_the_sum_of_the_latest_counts_of_each_gateway() -> None:
    standings = Standings(0.9)
    assert standings.record(ObjectiveStanding(gateway="g1", total=10, met=9)) == pytest.approx(0.0)
    assert standings.record(ObjectiveStanding(gateway="g2", total=10, met=8)) == pytest.approx(10.0)
    assert standings.record(ObjectiveStanding(gateway="g2", total=20, met=18)) == pytest.approx(0.0)
    for number in range(100):
        needed = standings.record(ObjectiveStanding(gateway=f"new{number}", total=1, met=1))
    assert needed == pytest.approx(-64.0), "only the last gateways count"
