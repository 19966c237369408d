"""The scheduler chooses the number of stages: only where the objective needs a group."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import SendPrepare, SendStop
from services.scheduler.domain.estimates.token_times import token_s
from services.scheduler.domain.events import AddModelsRequested
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.base import ErrorBody
from shared.contracts.model_info import AdapterInfo
from shared.contracts.models import ModelSpec, Slo
from tests.support.divided_models import SPEED, chosen, make, others, with_token_time
from tests.support.fake_node import MIB, model_info

SMALL = 400 * MIB


def test_objective_that_one_worker_misses_gets_the_smallest_group_that_meets_it() -> None:
    w = make(6.0)
    w.demand("m")
    assert (chosen(w).ready_by, chosen(w).stages) == ("pipeline", 2)
    assert len({s.node for s in w.starts("m")}) == 2
    assert [s.place.index for s in w.starts("m") if s.place] == [0, 1]
    assert {s.command.card.spec.stages for s in w.starts("m")} == {2}, "nodes receive the number of stages"
    [first] = w.state.instances.values()
    assert first.stages == 2
    assert w.state.models["m"].card.spec.stages == 1, "the operator's setting is as it was"


def test_tighter_objective_gets_more_stages() -> None:
    w = make(3.6)
    w.demand("m")
    assert chosen(w).stages == 3
    assert "misses the objective" in (others(w)[2].excluded or "")
    assert "less sharing or memory" in (others(w)[4].excluded or "")


def test_loaders_fetch_only_the_layers_of_their_stage() -> None:
    w = make(6.0)
    w.demand("m")
    layers = [e.command.layers for e in w.sent(SendPrepare) if e.command.layers is not None]
    assert [(x.first, x.end) for x in layers] == [(0, 6), (6, 12)]
    booked = [booking_of(w.state, s.node, "cpu:0").held_bytes for s in w.starts("m")]
    assert booked == [s.command.reserve_bytes for s in w.starts("m")]
    assert booked[0] < 1000 * MIB / 2


def test_objective_that_one_worker_meets_gets_one_worker_and_the_plan_says_why() -> None:
    w = make(20.0)
    w.demand("m")
    assert (chosen(w).ready_by, chosen(w).stages) == ("load", 1)
    assert sorted(others(w)) == [2, 3, 4]
    assert all("one worker meets the objective of 20 s" in (c.excluded or "") for c in others(w).values())
    predicted = [others(w)[s].predicted_ms or 0.0 for s in (2, 3, 4)]
    assert predicted == sorted(predicted, reverse=True), "the alternatives are predicted by their stages"


def test_objective_that_no_group_meets_gets_one_worker() -> None:
    w = make(1.0)
    w.demand("m")
    assert chosen(w).stages == 1
    assert all("misses the objective" in (c.excluded or "") for c in others(w).values())


@pytest.mark.parametrize(
    ("ttft", "options"),
    [
        (None, {}),
        (6.0, {"kind": "bloom"}),
        (6.0, {"slo": Slo(ttft=6.0, tpot=0.1)}),
        (6.0, {"isolation": "shared"}),
        (6.0, {"memory": 900 * MIB}),
    ],
    ids=["no objective", "not stageable", "time per token unknown", "shared", "memory is set"],
)
def test_model_that_may_not_be_divided_gets_one_worker(ttft: float | None, options: dict[str, Any]) -> None:
    w = make(ttft, **options)
    w.demand("m")
    assert chosen(w).stages == 1
    assert not others(w)


def test_adapter_that_is_registered_later_ends_the_group_and_its_base_gets_one_worker() -> None:
    w = make(6.0)
    w.demand("m")
    w.get_ready("m")
    groups = list(w.state.instances)
    spec = ModelSpec(name="sql", source="/m/sql", base="m")
    info = model_info(spec.source, MIB).model_copy(update={"adapter": AdapterInfo(rank=4, alpha=8)})
    answer = w.admin(AddModelsRequested(w.now, "adapter", (spec,), {"sql": info}, False))
    assert not isinstance(answer, ErrorBody), answer
    assert [s.command.instance_id for s in w.sent(SendStop)] == groups
    w.finish_stops()
    w.demand("m")
    assert chosen(w).stages == 1


def test_slow_node_is_not_taken_into_the_group() -> None:
    w = make(6.0, speeds=(SPEED, SPEED / 10, SPEED, SPEED / 10))
    w.demand("m")
    assert sorted(s.node for s in w.starts("m")) == ["n0", "n2"]


def test_group_that_is_slower_than_one_worker_is_refused() -> None:
    w = make(6.0, nodes=2, speeds=(SPEED, SPEED / 10))
    w.demand("m")
    assert chosen(w).stages == 1
    assert "not predicted sooner" in (others(w)[2].excluded or "")


def test_without_the_capability_there_are_no_groups() -> None:
    from services.scheduler.domain.values import replace

    w = make(6.0)
    w.policy = replace(w.policy, capabilities=w.policy.capabilities - {"pipeline"})
    w.demand("m")
    assert chosen(w).stages == 1
    assert not others(w)


def test_time_per_token_of_a_group_is_at_worst_that_of_all_stages() -> None:
    w = with_token_time(make(6.0, budget=SMALL, slo=Slo(ttft=6.0, tpot=0.1)), 45.0)
    w.demand("m")
    assert chosen(w).stages == 2, "2 x 45 ms and two hops are within 100 ms"
    assert "may take 138 ms for each further token" in (others(w)[3].excluded or "")


def test_objective_for_each_token_that_no_group_meets_gets_one_worker() -> None:
    w = with_token_time(make(6.0, budget=SMALL, slo=Slo(ttft=6.0, tpot=0.1)), 55.0)
    w.demand("m")
    assert chosen(w).stages == 1
    assert "misses the objective of 100 ms" in (others(w)[2].excluded or "")


def test_measured_time_per_token_allows_the_next_start_to_be_a_group() -> None:
    w = make(6.0, slo=Slo(ttft=6.0, tpot=0.1))
    running = w.up("m")
    assert chosen(w).stages == 1, "not measured yet"
    running.active = 1
    w.report()
    for _ in range(3):
        running.generated += 50
        w.tick(1)
    assert token_s(w.state, "m") == pytest.approx(0.02)
    running.active, running.idle_since = 0, w.now
    w.sleep("m")
    w.finish_stops()
    w.demand("m")
    assert chosen(w).stages == 2
