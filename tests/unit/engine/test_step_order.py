"""The order in which models share a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.fair_slots import Flow
from services.engine.domain.standings import Standings
from services.engine.domain.step_order import (
    LEAD_S,
    WEIGHT,
    ComputeTime,
    Priorities,
    Tags,
    Turn,
    Work,
    next_turn,
    update_priorities,
)
from shared.compliance import FIRST_ALPHA, PERIOD_S, required_requests
from shared.contracts.objectives import ObjectiveStanding

A, B = Flow(0, "a"), Flow(0, "b")


def flow_at(lane: str, lane_s: float = 0.0, flow: Flow = A, flow_s: float = 0.0, **about: Any) -> tuple[Work, Tags]:
    return Work(lane, flow, **about), Tags(flow_s, lane_s)


def first(works: Sequence[tuple[Work, Tags]], now: float = 0.0) -> str:
    return next_turn(works, now).work.lane


def test_lane_with_least_compute_time_goes_first() -> None:
    assert first([flow_at("a", 2.0), flow_at("b", 1.0), flow_at("c", 3.0)]) == "b"


def test_earliest_deadline_goes_before_lanes_without_one() -> None:
    works = [flow_at("none"), flow_at("late", 0.1, deadline=9.0), flow_at("soon", 0.2, deadline=5.0)]
    assert first(works, now=1.0) == "soon"


def test_deadline_that_has_passed_gives_no_precedence() -> None:
    assert first([flow_at("fair"), flow_at("missed", 0.1, deadline=5.0)], now=5.1) == "fair"


def test_deadlines_do_not_take_more_than_the_lead() -> None:
    assert first([flow_at("fair", 1.0), flow_at("urgent", 1.0 + LEAD_S, deadline=9.0)]) == "urgent"
    assert first([flow_at("fair", 1.0), flow_at("urgent", 1.01 + LEAD_S, deadline=9.0)]) == "fair"
    others = flow_at("fair", 9.0, A, 1.0), flow_at("urgent", 0.0, B, 1.01 + LEAD_S, deadline=9.0)
    assert first(others) == "fair", "the lead of the key counts, whatever it has had in this lane"


def test_key_with_least_compute_time_goes_first_and_then_its_lane_with_the_least() -> None:
    works = [flow_at("m1", 0.1, A, 9.0), flow_at("m2", 3.0, B, 4.0), flow_at("m3", 1.0, B, 4.0)]
    assert next_turn(works, 0.0) == Turn(works[2][0])


def test_higher_priority_goes_before_shares_and_deadlines() -> None:
    works = [flow_at("m1", 9.0, Flow(1, "a"), 9.0), flow_at("m2", 0.0, Flow(0, "b"), deadline=1.0)]
    assert first(works) == "m1"


def test_idle_time_is_not_saved_up() -> None:
    time = ComputeTime()
    busy = [Work("m1", A), Work("m2", A)]
    time.admit(busy)
    for work, took in ((busy[0], 7.0), (busy[1], 8.0)):
        time.charge(Turn(work), took)
    late, other = Work("m3", A), Work("m1", B)
    time.admit([*busy, late, other])
    assert time.tags(late).lane_s == 7.0, "as the lane of its flow that has had the least"
    assert time.tags(other) == Tags(15.0, 0.0), "as the other flow"
    time.charge(Turn(other), 100.0)
    time.admit(busy)
    time.charge(Turn(busy[0]), 1.0)
    time.admit([*busy, other])
    assert time.tags(other).flow_s == 115.0, "what it has had counts, too"


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
    """All lanes of one key are always busy, with any step lengths, deadlines and priorities."""
    works = [
        Work(f"{i}", A, deadline=1e9 if with_deadline[i] else None, required=required[i], is_low=low[i])
        for i in range(len(durations))
    ]
    time = ComputeTime()
    waited = {(one.lane, other.lane): 0.0 for one in works for other in works}
    for _ in range(steps):
        time.admit(works)
        turn = next_turn([(work, time.tags(work)) for work in works], now=0.0)
        name, took = turn.work.lane, durations[int(turn.work.lane)]
        time.charge(turn, took)
        for one in works:
            waited[one.lane, name] += took
            waited[name, one.lane] = 0.0
        for (lane, other), seconds in waited.items():
            assert seconds <= WEIGHT * (durations[int(lane)] + LEAD_S) + 2 * durations[int(other)] + 1e-9


@given(
    wanted=st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("1234"), st.floats(0.001, 1.0), st.booleans()),
        min_size=2,
        max_size=10,
        unique_by=lambda found: found[:2],
    ),
    weights=st.tuples(*[st.floats(0.25, 4.0)] * 4),
    steps=st.integers(1, 120),
)
def test_keys_that_are_always_busy_differ_by_the_lead_and_a_step(
    wanted: list[tuple[str, str, float, bool]], weights: tuple[float, ...], steps: int
) -> None:
    """Any keys have requests in any models, with and without deadlines."""
    weight_of = dict(zip("abcd", weights, strict=True))
    works = [
        Work(lane, Flow(0, key), weight_of[key], deadline=1e9 if has_deadline else None) for key, lane, _, has_deadline in wanted
    ]
    took = {(key, lane): step_s for key, lane, step_s, _ in wanted}
    time = ComputeTime()
    for _ in range(steps):
        time.admit(works)
        turn = next_turn([(work, time.tags(work)) for work in works], now=0.0)
        time.charge(turn, took[turn.work.flow.name, turn.work.lane])
        tags = [time.tags(work).flow_s for work in works]
        greatest = max(took[w.flow.name, w.lane] / w.weight for w in works)
        assert max(tags) - min(tags) <= LEAD_S + greatest + 1e-9


def test_model_that_needs_most_requests_goes_first_unless_it_has_low_priority() -> None:
    works = [
        flow_at("complies", deadline=1.0, required=-3.0),
        flow_at("nearly", deadline=9.0, required=2.0),
        flow_at("hopeless", deadline=1.0, required=80.0, is_low=True),
    ]
    assert next_turn(works, now=0.0) == Turn(works[1][0], has_precedence=True)
    assert first([works[0], works[2]]) == "complies"
    assert first([flow_at("complies", 0.1, deadline=1.0), flow_at("hopeless", is_low=True)], now=2.0) == "hopeless"


def test_step_with_precedence_is_charged_less_and_a_greater_weight_as_well() -> None:
    for turn, expected in (
        (Turn(Work("m", A)), Tags(2.0, 2.0)),
        (Turn(Work("m", A), has_precedence=True), Tags(2.0 / WEIGHT, 2.0 / WEIGHT)),
        (Turn(Work("m", A, weight=4.0)), Tags(0.5, 2.0)),
    ):
        time = ComputeTime()
        time.admit([turn.work])
        time.charge(turn, 2.0)
        assert time.tags(turn.work) == expected


def test_lanes_that_are_gone_and_flows_that_are_idle_are_forgotten() -> None:
    time = ComputeTime()
    for number in range(3_000):
        work = Work("m", Flow(0, f"{number}"))
        time.admit([work])
        time.charge(Turn(work), 1.0)
    assert len(time._flows) <= 1_026
    time.forget("m")
    time.admit([work])
    assert time.tags(work).lane_s == 0.0 + time._last_lane[work.flow]


def test_priorities_follow_the_share_of_models_that_comply() -> None:
    required = {"a": -1.0, "b": 1.0, "c": 5.0}
    begun = update_priorities(Priorities(), required, now=100.0)
    assert begun == Priorities(FIRST_ALPHA, 1.0, 100.0, frozenset({"c"}))
    fell = update_priorities(begun, required, now=100.0 + PERIOD_S)
    assert fell.alpha == FIRST_ALPHA / 2
    assert update_priorities(fell, required, now=101.0 + PERIOD_S) == fell
    rose = update_priorities(fell, dict.fromkeys(required, 0.0), now=100.0 + 2 * PERIOD_S)
    assert (rose.alpha, rose.low) == (FIRST_ALPHA, frozenset())
    assert update_priorities(begun, {}, now=200.0).low == frozenset(), "no model has counts"


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
    time, names = ComputeTime(), [f"m{number}" for number in range(len(shares))]
    queues: dict[str, list[list[float]]] = {name: [] for name in names}
    served, priorities, now = dict.fromkeys(names, 0.0), Priorities(), 0.0
    while now < seconds:
        while arrivals and arrivals[-1][0] <= now:
            at, name = arrivals.pop()
            if not queues[name]:
                served[name] = now
            queues[name].append([at, steps])
        busy = [name for name, queue in queues.items() if queue]
        if not busy:
            now = arrivals[-1][0] if arrivals else seconds
            continue
        required = {n: required_requests(found.total[n], found.met[n], percentile) for n in names if found.total[n]}
        priorities = update_priorities(priorities, required if policy == "rrc" else {}, now)
        views = []
        for name in busy:
            deadline = min((at + within_s for at, _ in queues[name] if at + within_s >= now), default=None)
            needed = required.get(name, 0.0) if policy == "rrc" else 0.0
            views.append(Work(name, A, deadline=deadline, required=needed, is_low=name in priorities.low))
        time.admit(views)
        earliest = min(views, key=lambda work: queues[work.lane][0][0])
        turn = next_turn([(work, time.tags(work)) for work in views], now) if policy != "fifo" else Turn(earliest)
        name = turn.work.lane
        found.longest_wait_s = max(found.longest_wait_s, now - served[name])
        now += step_s
        served[name] = now
        time.charge(turn, step_s)
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
    works = [flow_at(f"{i}", tag, A if i % 2 else B, tag % 2, deadline=deadline) for i, (tag, deadline) in enumerate(found)]
    assert next_turn(works, now) == next_turn(works[::-1], now)


def test_standing_is_the_sum_of_the_latest_counts_of_each_gateway() -> None:
    standings = Standings(0.9)
    assert standings.record(ObjectiveStanding(gateway="g1", total=10, met=9)) == pytest.approx(0.0)
    assert standings.record(ObjectiveStanding(gateway="g2", total=10, met=8)) == pytest.approx(10.0)
    assert standings.record(ObjectiveStanding(gateway="g2", total=20, met=18)) == pytest.approx(0.0)
    for number in range(100):
        needed = standings.record(ObjectiveStanding(gateway=f"new{number}", total=1, met=1))
    assert needed == pytest.approx(-64.0), "only the last gateways count"
