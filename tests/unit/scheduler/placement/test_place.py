"""Placements and reported obstacles: rules 1 to 4 of placement."""

from __future__ import annotations

import pytest

from services.scheduler.domain.effects import PublishLoadFailed, SendPrepare
from services.scheduler.domain.policy import Policy
from shared.errors import CheckpointInvalid
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


def test_1_replicas_min_backs_off_after_failures(w: World) -> None:
    w.node()
    w.model("a", replicas={"min": 1, "max": 1})
    assert len(w.starts("a")) == 1
    w.fail("a", CheckpointInvalid("bad shard").body())
    for _ in range(3):
        w.tick(0.25)
    assert len(w.starts("a")) == 1
    assert w.state.last_plan_of("a").reason.startswith("backing off")  # type: ignore[union-attr]
    w.tick(0.5)
    assert len(w.starts("a")) == 2
    w.fail("a", CheckpointInvalid("bad shard").body())
    w.tick(1.5)
    assert len(w.starts("a")) == 2
    w.tick(1.0)
    assert len(w.starts("a")) == 3


def test_1_backoff_has_a_limit() -> None:
    assert [Policy().backoff_s(n) for n in (1, 2, 3, 6, 50)] == [1.0, 2.0, 4.0, 30.0, 30.0]


def test_2_without_nodes_demand_waits_then_fails(w: World) -> None:
    w.model("a")
    noted = w.demand("a")
    assert noted.outlook == "waiting"
    assert "no node is alive" in noted.reason
    for _ in range(29):
        w.now += 1
        w.demand("a")
    assert not w.sent(PublishLoadFailed)
    w.now += 2
    w.demand("a")
    assert w.sent(PublishLoadFailed)[0].event.error.code == "unavailable"
    assert w.state.models["a"].error is None, "it has not failed"


def test_2_only_time_without_a_node_counts_toward_failure(w: World) -> None:
    """Only time without a node counts toward the failure of a wait.

    Chaos seed 1: requests that had waited long for other reasons failed when the nodes did not
    report for a moment.
    """
    w.node("n1")
    w.model("a")
    w.tick(6.0, nodes_report=False)
    w.demand("a", oldest_wait_ms=60_000)
    assert not w.sent(PublishLoadFailed)
    w.tick(25.0, nodes_report=False)
    w.demand("a", oldest_wait_ms=85_000)
    assert w.sent(PublishLoadFailed)[0].event.error.code == "unavailable"


def test_2_new_node_takes_waiting_requests(w: World) -> None:
    w.model("a")
    plan = w.demand("a").plan_id
    w.node()
    assert len(w.starts("a")) == 1
    assert w.starts("a")[0].command.plan_id == plan


def test_3_model_waits_for_a_larger_node_that_restarts(w: World) -> None:
    w.node("small", budget=200 * MIB)
    w.node("large")
    w.model("a")
    w.up("a")
    w.agents["large"].instances.clear()
    w.tick(6.0, nodes_report=False)
    w.report("small")
    w.tick(nodes_report=False)
    w.demand("a", oldest_wait_ms=60_000)
    assert not w.sent(PublishLoadFailed)
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert (plan.way, plan.reason.split(":")[0]) == ("wait", "waiting for large, which does not report now")
    w.agents["large"].boot = "boot-2"
    w.report("large")
    assert len(w.starts("a")) == 2


def test_3_requests_fail_if_the_larger_node_stays_away(w: World) -> None:
    w.node("small", budget=200 * MIB)
    w.node("large")
    w.model("a")
    for _ in range(31):
        w.now += 1
        w.report("small")
        w.tick(nodes_report=False)
    assert not w.sent(PublishLoadFailed)
    w.demand("a")
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.code == "insufficient_memory"


def test_3_waiting_requests_fail_once_the_larger_node_has_stayed_away(w: World) -> None:
    w.node("small", budget=200 * MIB)
    w.node("large")
    w.model("a")
    for second in range(31):
        w.now += 1
        w.report("small")
        w.tick(nodes_report=False)
        if second == 27:
            w.demand("a")
            assert not w.sent(PublishLoadFailed)
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.code == "insufficient_memory"


def test_3_model_that_can_never_fit_fails_immediately(w: World) -> None:
    w.model("big", weights=2000 * MIB)
    w.node(budget=1000 * MIB)
    w.demand("big")
    (failed,) = w.sent(PublishLoadFailed)
    assert failed.event.error.code == "insufficient_memory"
    for part in ("2.17 GiB", "1000 MiB", "max_model_len"):
        assert part in failed.event.error.message
    assert w.state.models["big"].error == failed.event.error.message
    assert w.state.last_plan_of("big").way == "impossible"  # type: ignore[union-attr]


def test_the_loader_receives_the_gpu_of_the_builtin_engine(w: World) -> None:
    w.node().devices = ("cuda:0",)
    w.report("n1")
    w.model("a")
    w.demand("a")
    assert [s.command.device for s in w.sent(SendPrepare)] == ["cuda:0"]


def test_4_many_waiting_gateways_cause_one_load(w: World) -> None:
    w.node()
    w.model("a")
    assert {w.demand("a", 5, gateway=f"g{i}").outlook for i in range(20)} == {"starting"}
    assert len(w.starts("a")) == len(w.sent(SendPrepare)) == 1
    w.get_ready()
    assert w.demand("a").outlook == "ready"
    assert len(w.starts("a")) == 1


@pytest.mark.parametrize("held", [True, False])
def test_4_device_with_the_shortest_predicted_start_is_chosen(w: World, held: bool) -> None:
    """The soonest device is taken.

    It has the weights in memory, held by an instance or cached by the loader.
    """
    from services.scheduler.domain.events import LoaderStatusReceived
    from shared.contracts.loader import CachedModel, LoaderStatus, SegmentStatus

    w.node("n1")
    w.node("n2")
    w.model("a")
    segment = SegmentStatus(weights_id="rev-/m/a", model="a", segment="s", total_bytes=1, loaded_bytes=1, holders=())
    cached = CachedModel(weights_id="rev-/m/a", tier="dram", nbytes=1)
    elsewhere = CachedModel(weights_id="rev-/m/a", tier="ssd", nbytes=1)
    where = {"segments": (segment,)} if held else {"cached": (cached,)}
    w.send(LoaderStatusReceived(w.now, LoaderStatus(node="n1", boot_id="b", cached=(elsewhere,))))
    w.send(LoaderStatusReceived(w.now, LoaderStatus.model_validate({"node": "n2", "boot_id": "b", **where})))
    w.demand("a")
    assert w.starts("a")[0].node == "n2"
    assert [c.node for c in w.state.last_plan_of("a").candidates] == ["n1", "n2"]  # type: ignore[union-attr]


def test_priority_precedes_waiting_time(w: World) -> None:
    w.model("low")
    w.model("high", priority=5)
    w.demand("low", oldest_wait_ms=9000)
    w.demand("high")
    w.node(budget=400 * MIB)
    assert len(w.starts("high")) == 1
    assert not w.starts("low")
