"""Every option of the mesh as a live decision: choice, source and predicted cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.domain.effects import SendResume, SendStart
from services.scheduler.domain.events import LoaderStatusReceived
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus
from shared.contracts.node import InstanceState
from shared.contracts.plans import Candidate
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ONE = 400 * MIB
"""Room for one model."""


@pytest.fixture
def w() -> World:
    world = World()
    world.node("n1", ONE)
    return world


def report_loader(w: World, node: str, *cached: CachedModel, queue_ms: float = 0.0) -> None:
    links = (
        LinkStatus(link="ssd:a", bytes_per_second=2e8, finish_ms=queue_ms),
        LinkStatus(link="remote:b", bytes_per_second=5e7),
        LinkStatus(link="bus:cpu:0", bytes_per_second=1e10),
    )
    status = LoaderStatus(node=node, boot_id="b", cached=cached, links=links, bytes_per_second=2e8)
    w.send(LoaderStatusReceived(w.now, status))


def cached(name: str, tier: str) -> CachedModel:
    return CachedModel.model_validate({"weights_id": f"rev-/m/{name}", "tier": tier, "nbytes": 100 * MIB})


def chosen(w: World, model: str) -> Candidate:
    plan = w.state.last_plan_of(model)
    assert plan is not None
    assert plan.chosen is not None, plan.reason
    return plan.chosen


def test_ready_instance_is_used_without_a_new_plan(w: World) -> None:
    w.model("m")
    w.up("m")
    before = w.state.last_plan_of("m")
    assert w.demand("m").outlook == "ready"
    assert w.state.last_plan_of("m") == before
    assert len(w.starts("m")) == 1


@pytest.mark.parametrize(("state", "way"), [(InstanceState.ASLEEP, "wake"), (InstanceState.SUSPENDED, "restore")])
def test_from_sleep_and_from_a_snapshot(w: World, state: InstanceState, way: str) -> None:
    w.model("m")
    running = w.up("m")
    w.can_suspend(running, resume_ms=70.0)
    w.sleep("m")
    w.agents["n1"].finish_stops()
    running.state = state
    w.report()
    w.demand("m")
    found = chosen(w, "m")
    assert (found.ready_by, found.way) == (way, "restore")
    assert found.predicted["restore"] == 70.0
    assert [e.command.instance_id for e in w.sent(SendResume)] == [running.command.instance_id]


@pytest.mark.parametrize(("tier", "mb_per_s"), [("dram", 0.0), ("ssd", 200.0), ("remote", 50.0)])
def test_load_time_follows_the_slowest_link_from_each_tier(w: World, tier: str, mb_per_s: float) -> None:
    w.model("m")
    source = w.state.models["m"].card.info
    far = source.model_copy(update={"source": "s3://bucket/m"})
    model = w.state.models["m"]
    object.__setattr__(model.card, "info", far)
    report_loader(w, "n1", *([cached("m", tier)] if tier != "remote" else []))
    w.demand("m")
    found = chosen(w, "m")
    assert (found.ready_by, found.source) == ("load", tier)
    expected = 100 * MIB / (mb_per_s * 1e6) * 1e3 if mb_per_s else 0.0
    assert found.predicted["load"] == pytest.approx(expected)
    assert found.predicted.get("fetch", 0.0) == pytest.approx(expected if tier == "remote" else 0.0)


def test_queueing_time_of_the_links_is_added(w: World) -> None:
    w.model("m")
    report_loader(w, "n1", cached("m", "ssd"), queue_ms=4000.0)
    w.demand("m")
    found = chosen(w, "m")
    assert found.queued_ms == pytest.approx(4000.0)
    assert found.predicted["load"] == pytest.approx(4000.0 + 100 * MIB / 2e8 * 1e3)


def test_eviction_of_an_idle_instance_is_predicted(w: World) -> None:
    w.model("old")
    w.up("old")
    w.model("m")
    w.tick(10.0)
    w.demand("m")
    found = chosen(w, "m")
    assert (found.clearing, found.way) == ("evict", "evict_then_load")
    assert found.predicted["reserve"] > 0
    assert found.others_ms > 0
    assert len(found.victims) == 1


def test_preemption_of_a_serving_instance_is_predicted(w: World) -> None:
    w.model("serves")
    w.up("serves").active = 2
    w.policy = replace(w.policy, capabilities=frozenset({"preempt"}))
    w.report()
    w.model("m")
    w.demand("m")
    assert not w.starts("m")
    w.tick(w.policy.preempt_after_s + 0.5)
    w.demand("m", oldest_wait_ms=int(w.policy.preempt_after_s * 1e3) + 500)
    found = chosen(w, "m")
    assert (found.clearing, len(found.victims)) == ("preempt", 1)
    assert not any(isinstance(e, SendStart) and e.command.card.name == "m" for e in w.effects), "not before its bytes are there"
