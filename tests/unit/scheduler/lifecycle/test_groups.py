"""Groups of stages on several nodes: granted together, started together, ended together."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import OrderMigration, SendPrepare, SendStart, SendStop
from services.scheduler.domain.events import NodeStatusReceived, StartRefused
from services.scheduler.domain.placement.groups import card_of_parts
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.changes import Drop, apply
from services.scheduler.domain.state.volatile import LaterStage
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.contracts.stages import RankOf
from shared.errors import EngineFailed, EngineKilled, InsufficientMemory
from tests.support.fake_node import MIB
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.lifecycle.group_world import BUDGET, STAGES, make
from tests.unit.scheduler.world import World


def first_of(w: World) -> Running:
    return next(r for r in w.of("m") if r.command.instance_id in w.state.instances)


def later_of(w: World) -> Running:
    return next(r for r in w.of("m") if r.command.instance_id in w.state.later_stages)


def started(**options: Any) -> World:
    w = make(**options)
    w.demand("m")
    return w


def test_stages_are_started_on_different_nodes_in_one_decision() -> None:
    w = started()
    starts = w.starts("m")
    assert len({s.node for s in starts}) == STAGES
    assert [(s.place.index, s.place.count) for s in starts if s.place] == [(0, 2), (1, 2)]
    assert {s.place.first for s in starts if s.place} == {starts[0].command.instance_id}
    prepared = [e for e in w.sent(SendPrepare) if e.command.layers is not None]
    assert [(e.node, e.command.layers) for e in prepared] == [(s.node, s.layers) for s in starts]
    assert list(w.state.instances) == [starts[0].command.instance_id], "the group is one instance"
    [decision] = [d for d in w.decisions if any(isinstance(e, SendStart) for e in d.effects)]
    assert len([e for e in decision.effects if isinstance(e, SendStart)]) == STAGES


def test_every_device_is_booked_for_its_stage_alone() -> None:
    w = started()
    booked = [booking_of(w.state, s.node, "cpu:0").held_bytes for s in w.starts("m")]
    assert booked == [s.command.reserve_bytes for s in w.starts("m")]
    w.report()
    assert [booking_of(w.state, s.node, "cpu:0").held_bytes for s in w.starts("m")] == booked, "reported bytes count once"


def test_without_room_for_every_stage_nothing_is_reserved() -> None:
    w = make(nodes=2)
    w.change_node("n1", "cordon")
    w.demand("m")
    assert not w.starts("m")
    assert not w.state.later_stages
    assert booking_of(w.state, "n0", "cpu:0").held_bytes == 0
    w.change_node("n1", "uncordon")
    assert len(w.starts("m")) == STAGES, "placed once there is room for all"


def test_stages_of_one_node_are_predicted_one_after_the_other() -> None:
    w = make()
    card = w.state.models["m"].card
    assert card_of_parts(card, 1).info.weights_bytes == 81 * MIB
    assert card_of_parts(card, 2).info.weights_bytes == 160 * MIB, "never more than the model has"


def test_slow_node_is_not_taken_and_the_prediction_is_that_of_a_part() -> None:
    w = make(nodes=3)
    for node, speed in (("n0", 1e8), ("n1", 1e7), ("n2", 1e8)):
        w.loader(node, (), bytes_per_second=speed)
    w.demand("m")
    assert sorted(s.node for s in w.starts("m")) == ["n0", "n2"]
    chosen = w.state.last_plan_of("m").chosen  # type: ignore[union-attr]
    assert chosen is not None
    assert (chosen.ready_by, chosen.stages) == ("pipeline", 2)
    assert chosen.predicted["load"] == pytest.approx(81 * MIB / 1e8 * 1e3, rel=0.05)


def forget_stages(w: World) -> None:
    """Forget what a new leader does not know: later stages are not stored."""
    apply(w.state, [Drop(LaterStage, stage) for stage in list(w.state.later_stages)])


def end(w: World, running: Running, state: InstanceState, error: ErrorBody | None = None) -> None:
    running.state, running.error = state, error
    w.report()


def test_later_stage_that_fails_during_the_start_ends_the_group_which_is_placed_again() -> None:
    w = started()
    before = {s.command.instance_id for s in w.starts("m")}
    first = first_of(w)
    end(w, later_of(w), InstanceState.FAILED, EngineKilled("killed").body())
    assert [s.command.instance_id for s in w.sent(SendStop)] == [first.command.instance_id]
    w.finish_stops()
    w.tick(1)
    assert not w.state.later_stages.keys() & before
    assert len({s.command.instance_id for s in w.starts("m")} - before) == STAGES


def test_device_of_a_failed_later_stage_is_avoided_by_the_next_attempt() -> None:
    w = started(nodes=4)
    later = later_of(w)
    failed = w.state.later_stages[later.command.instance_id]
    end(w, later, InstanceState.FAILED, EngineFailed("its device is broken").body())
    assert w.state.failures["m"].failed_devices == (f"{failed.node}/cpu:0",)
    w.finish_stops()
    w.tick(1)
    assert failed.node not in {s.node for s in w.starts("m")[STAGES:]}


def test_first_stage_that_ends_has_the_later_one_stopped() -> None:
    w = started()
    w.get_ready("m")
    later = later_of(w)
    w.demand("m", 0)
    end(w, first_of(w), InstanceState.FAILED, EngineKilled("killed").body())
    assert later.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]
    w.finish_stops()
    assert not w.of("m")
    assert not w.state.later_stages
    assert all(b.held_bytes == 0 for b in w.state.bookings.values())


def test_silent_node_of_a_later_stage_ends_the_start() -> None:
    w = started()
    first = first_of(w)
    lost = next(x.node for x in w.state.later_stages.values())
    agent = w.agents.pop(lost)
    w.now += w.policy.node_lost_after_s + 1
    w.demand("m")
    w.tick()
    assert first.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]
    w.finish_stops()
    w.tick(1)
    assert {s.node for s in w.starts("m")[STAGES:]} == {f"n{n}" for n in range(3)} - {lost}, "on nodes that are alive"
    w.agents[lost] = agent
    w.tick(1)
    w.finish_stops()
    assert not [r for r in agent.instances.values() if r.state.holds_memory], "its stage is stopped when it is back"


def test_refused_stage_stops_the_group_and_is_no_failure_of_the_model() -> None:
    w = started()
    first, later = first_of(w), later_of(w)
    w.send(StartRefused(w.now, later.command.instance_id, InsufficientMemory("no room", should_retry=True).body()))
    assert first.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]
    assert "m" not in w.state.failures


def test_drained_node_of_a_later_stage_stops_an_idle_group() -> None:
    w = started()
    w.get_ready("m")
    first, later = first_of(w), later_of(w)
    w.change_node(next(x.node for x in w.state.later_stages.values()), "drain")
    w.finish_stops()
    w.tick(1)
    w.finish_stops()
    assert not first.state.holds_memory
    assert not later.state.holds_memory


def test_drained_node_of_a_later_stage_moves_the_requests_of_the_group() -> None:
    w = started()
    w.node("n3")  # with n2, room for a second group
    w.get_ready("m")
    first, later = first_of(w), later_of(w)
    first.active = 1
    w.tick()
    drained = w.state.later_stages[later.command.instance_id].node
    w.change_node(drained, "drain")
    w.tick(0.25)
    assert not [s for s in w.sent(SendStop) if s.command.instance_id == first.command.instance_id], (
        "nothing could take its requests"
    )
    second = w.starts("m")[STAGES:]
    assert len(second) == STAGES
    assert drained not in {s.node for s in second}
    w.get_ready("m")
    w.tick(0.25)
    [record] = [e.record for e in w.sent(OrderMigration)]
    assert (record.reason, record.source_instance) == ("drain", first.command.instance_id)
    assert record.instance_id == second[0].command.instance_id
    assert first.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]


def test_group_with_a_stage_on_a_drained_node_has_the_drain_timeout_to_finish() -> None:
    w = started()
    w.get_ready("m")
    first, later = first_of(w), later_of(w)
    first.active = 1
    w.tick()
    w.change_node(w.state.later_stages[later.command.instance_id].node, "drain")
    w.tick(1)
    assert not w.sent(SendStop), "no other nodes have room for a group"
    w.tick(w.policy.drain_timeout_s)
    assert first.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]


def test_new_leader_learns_the_later_stages_from_reports() -> None:
    w = started()
    w.get_ready("m")
    later = later_of(w).command.instance_id
    known = w.state.later_stages[later]
    forget_stages(w)
    w.tick(1)
    assert w.state.later_stages[later].first == known.first
    assert not [s for s in w.sent(SendStop) if s.command.instance_id == later]


def test_start_of_which_a_dead_leader_sent_only_the_first_stage_is_placed_again() -> None:
    w = started()
    first, later = first_of(w).command.instance_id, later_of(w).command.instance_id
    w.agents[w.state.later_stages[later].node].instances.pop(later)
    forget_stages(w)
    w.state.recovered_at = w.now
    w.tick(1)
    assert not w.sent(SendStop), "its nodes may report it yet"
    w.now += w.policy.node_lost_after_s + w.policy.absence_grace_s
    w.demand("m")
    w.tick()
    assert [s.command.instance_id for s in w.sent(SendStop)] == [first]
    w.finish_stops()
    w.demand("m")
    assert len(w.starts("m")) == 2 * STAGES


def test_later_stage_without_an_instance_is_stopped() -> None:
    w = started()
    w.get_ready("m")
    later = later_of(w)
    forget_stages(w)
    first = first_of(w).command.instance_id
    for agent in w.agents.values():
        agent.instances.pop(first, None)
    w.tick(w.policy.absence_grace_s + 1)
    assert later.command.instance_id in [s.command.instance_id for s in w.sent(SendStop)]


def test_omitted_stage_is_gone() -> None:
    w = started()
    later = later_of(w).command.instance_id
    node = w.state.later_stages[later].node
    w.now += w.policy.absence_grace_s + 1
    w.agents[node].instances.pop(later)
    w.send(NodeStatusReceived(w.now, w.agents[node].status(w.now)))
    assert later not in w.state.later_stages


@pytest.mark.parametrize("loads_itself", [True, False])
def test_each_rank_of_vllm_has_its_part_prepared_unless_it_loads_by_itself(loads_itself: bool) -> None:
    more = {} if loads_itself else {"load_format": "thaw"}
    w = started(engine="vllm", memory=100 * MIB, engine_args={"tensor_parallel_size": STAGES, **more})
    starts = w.starts("m")
    assert len({s.node for s in starts}) == STAGES
    assert [s.command.reserve_bytes for s in starts] == [50 * MIB] * STAGES
    prepares = [(e.node, e.command.layers, e.command.device, e.command.rank) for e in w.sent(SendPrepare)]
    expected = [(s.node, None, None, RankOf(index=i, count=STAGES)) for i, s in enumerate(starts)]
    assert prepares == ([] if loads_itself else expected)


def test_pipeline_ranks_of_vllm_have_whole_tensors() -> None:
    args = {"pipeline_parallel_size": STAGES, "load_format": "thaw"}
    w = started(engine="vllm", memory=100 * MIB, engine_args=args)
    assert [e.command.rank for e in w.sent(SendPrepare)] == [None] * STAGES


def test_load_of_a_rank_is_predicted_with_the_bytes_of_its_part() -> None:
    args = {"tensor_parallel_size": STAGES, "load_format": "thaw"}
    w = make(engine="vllm", memory=100 * MIB, engine_args=args)
    card = w.state.models["m"].card
    card = card.model_copy(update={"info": card.info.model_copy(update={"divided_bytes": 100 * MIB})})
    assert card_of_parts(card, 1).info.weights_bytes == 110 * MIB
    assert card_of_parts(card, 2).info.weights_bytes == 160 * MIB
    itself = card.model_copy(update={"spec": card.spec.model_copy(update={"engine_args": {"tensor_parallel_size": STAGES}})})
    assert card_of_parts(itself, 1).info.weights_bytes == 81 * MIB


def test_devices_of_one_node_are_prepared_by_one_message() -> None:
    w = make(nodes=0)
    w.node("n", BUDGET, devices=("cpu:0", "cpu:1"))
    w.demand("m")
    [start] = w.starts("m")
    [prepare] = [e.command for e in w.sent(SendPrepare)]
    layers = w.state.models["m"].card.pipeline
    instance = start.command.instance_id
    assert [(p.holder, p.device, p.layers, p.rank) for p in prepare.parts] == [
        (instance, "cpu:0", layers[0], None),
        (f"{instance}+s1", "cpu:1", layers[1], None),
    ]
    assert (prepare.instance_id, prepare.device, prepare.layers) == (instance, "cpu:0", layers[0]), "for an earlier loader"


def test_ranks_of_a_divided_model_have_a_part_each_on_one_node_too() -> None:
    """Its files have no whole weights that the ranks of a node could share."""
    w = make(
        nodes=0, engine="vllm", memory=100 * MIB, engine_args={"tensor_parallel_size": STAGES, "load_format": "thaw"}, ranks=STAGES
    )
    w.node("n", BUDGET, devices=("cpu:0", "cpu:1"))
    w.demand("m")
    [start] = w.starts("m")
    [prepare] = [e.command for e in w.sent(SendPrepare)]
    instance = start.command.instance_id
    ranks = [RankOf(index=i, count=STAGES) for i in range(STAGES)]
    found = [(p.holder, p.device, p.layers, p.rank) for p in prepare.parts]
    assert found == [(instance, None, None, ranks[0]), (f"{instance}+s1", None, None, ranks[1])]
    assert (prepare.device, prepare.rank) == (None, ranks[0])
