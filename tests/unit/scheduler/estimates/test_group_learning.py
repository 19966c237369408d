"""Starts of groups on several nodes are learned from: the bandwidth of each part, and processes."""

from __future__ import annotations

import pytest

from services.scheduler.domain.estimates.start_times import Forecast, bandwidth, learned_values
from services.scheduler.domain.placement.groups import card_of_parts
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.measurements import ANYWHERE
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import Candidate
from tests.support.divided_models import SPEED, make
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

REMOTE = bandwidth("remote")
PART = 79 * MIB
"""Six layers of 13 MiB, and the embeddings or the head."""


def chosen(w: World) -> Candidate:
    plan = w.state.last_plan_of("m")
    assert plan is not None
    assert plan.chosen is not None
    return plan.chosen


def started(*seconds: float) -> World:
    """Return a world whose group of two stages has loaded its parts in these times."""
    w = make(6.0, nodes=2)
    w.demand("m")
    assert chosen(w).stage_sources == ("remote", "remote")
    for running, took in zip(sorted(w.of("m"), key=lambda r: r.group.index if r.group else 0), seconds, strict=True):
        running.phases = (
            PhaseSpan(phase=Phase.CONTAINER, start_ms=-9000, duration_ms=80),
            PhaseSpan(phase=Phase.FETCH, start_ms=-9000, duration_ms=took * 1e3),
            PhaseSpan(phase=Phase.LOAD, start_ms=-9000, duration_ms=took * 1e3),
            PhaseSpan(phase=Phase.PROFILE, start_ms=-2000, duration_ms=1900),
        )
    w.now += 9
    w.get_ready("m")
    return w


def test_each_node_learns_the_bandwidth_of_its_part() -> None:
    w = started(4.0, 8.0)
    nodes = [s.node for s in w.starts("m")]
    speeds = [learned_values(w.state, "m", n)[REMOTE].value for n in nodes]
    assert speeds == pytest.approx([PART / 4, PART / 8], rel=0.01)


def test_process_phases_are_learned_and_those_of_a_part_are_not() -> None:
    w = started(4.0, 4.0)
    for where in ("n0", "n1", ANYWHERE):
        learned = learned_values(w.state, "m", where)
        assert learned["container"].value == pytest.approx(80, abs=20)
        assert not {"init", "profile", "fetch", "load"} & set(learned)


def test_next_group_is_predicted_by_what_the_last_one_has_measured() -> None:
    w = started(4.0, 8.0)
    part = Forecast(w.state, card_of_parts(w.state.models["m"].card.in_stages(2), 1), w.now)
    ms = {s.node: part.predict(booking_of(w.state, s.node, "cpu:0"), leaving=False).phases["load"] for s in w.starts("m")}
    assert sorted(ms.values()) == pytest.approx([4000, 8000], rel=0.01)
    assert pytest.approx(4, rel=0.05) == PART / SPEED, "the loaders reported the same for both"


def test_prediction_error_is_recorded() -> None:
    w = started(4.0, 8.0)
    assert chosen(w).took_ms == pytest.approx(9000)
    assert chosen(w).error_ms is not None


def test_later_stage_is_learned_once() -> None:
    w = started(4.0, 8.0)
    count = {n: learned_values(w.state, "m", n)[REMOTE].count for n in ("n0", "n1")}
    w.tick(1)
    assert {n: learned_values(w.state, "m", n)[REMOTE].count for n in ("n0", "n1")} == count == {"n0": 1, "n1": 1}


def test_failed_stage_is_not_learned_from() -> None:
    w = make(6.0, nodes=2)
    w.demand("m")
    for running in w.of("m"):
        running.phases = (PhaseSpan(phase=Phase.LOAD, start_ms=-9000, duration_ms=4000),)
        running.state = InstanceState.FAILED
    w.report()
    assert not w.state.estimates
