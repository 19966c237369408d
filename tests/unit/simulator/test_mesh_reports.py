"""Reports of simulated nodes and loaders, and what the scheduler decides from them."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import Mock

import pytest

from services.scheduler.domain.demand.slo import usage_of
from services.scheduler.profiles import profile_named
from shared.contracts.loader import PrefetchWeights
from shared.contracts.node import StartInstance
from simulator.config import GB, Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.instances import Instance, Run
from simulator.mesh.agents import LOADS_COALESCE_S
from simulator.mesh.machine import MeshInstance, MeshNode
from simulator.mesh.run import Simulation, card_of
from simulator.workloads.request import Request

SERVICE = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=4)
MODEL = ModelGroup(name="m", weights_gb=10, kv_gb=5, service=SERVICE, slo_ttft=10, keep_alive=1)
START_S = 4.5
"""Duration of a start whose weights are in the node's memory or on its disk."""


def simulation(*models: ModelGroup, node: dict[str, object] | None = None, **runtime: object) -> Simulation:
    links = LinkSpeeds(remote=1, ssd=5, device=20)
    group = NodeGroup.model_validate({"devices": 1, "device_gb": 20, "dram_gb": 100, "links": links, **(node or {})})
    startup = Startup(container_s=4, init_s=0.5, leave_s=0.3)
    settings = {"startup": startup, "message_ms": 0, "capabilities": frozenset(), **runtime}
    cluster = ClusterFile(nodes=(group,), runtime=Runtime.model_validate(settings))
    return Simulation(cluster, models, profile_named("thaw"))


def ask(at: float, model: str, output: int = 2) -> Request:
    return Request(at, model, 100, output)


def but(name: str, **other: object) -> ModelGroup:
    return MODEL.model_copy(update={"name": name, **other})


def test_a_loader_reports_the_memory_that_is_left_for_cached_weights() -> None:
    models = [but("suspended", snapshot_gb=3.0), but("cached"), but("served", keep_alive=-1)]
    run = simulation(*models, node={"device_gb": 16}, capabilities=frozenset({"suspend"}))
    run.run([ask(0, "cached"), ask(20, "suspended"), ask(40, "served", 1000)])
    (node,) = run.nodes.values()
    status = run.state.loaders[node.name].status
    assert status == node.loader_status()
    assert {c.weights_id for c in status.cached if c.tier == "dram"} == {"cached", "suspended"}
    assert status.dram_bytes == 20 * GB
    assert status.dram_budget_bytes == (100 - 10 - node.snapshots / GB) * GB
    assert node.snapshots > 0


def test_no_prefetch_displaces_likelier_weights_from_full_memory() -> None:
    models = [but("served", keep_alive=-1), but("likely"), but("rare")]
    run = simulation(*models, node={"devices": 3, "dram_gb": 20, "ssd_gb": 100})
    run.agents.weights.prefetch = orders = Mock(wraps=run.agents.weights.prefetch)  # type: ignore[method-assign]  # is observed
    likely = [ask(at, "likely") for at in range(10, 400, 30)]
    run.run([ask(0, "served", 4000), ask(25, "rare"), ask(145, "rare"), *likely])
    # The second start of the rare one has displaced the likely one, which then is fetched again.
    assert [order.args[1].card.name for order in orders.call_args_list] == ["likely"]


def test_fetched_weights_are_reported_and_loaded_where_they_are() -> None:
    run = simulation(MODEL.model_copy(update={"copies": 2}), node={"count": 2})
    run.run([ask(0, "m-0"), ask(0.5, "m-1"), ask(60, "m-1")])
    remote_s = 10 + 0.5
    assert [s.queued for s in run.outcome.served] == pytest.approx([remote_s, remote_s, START_S], abs=0.1)


def test_the_destination_of_a_migration_reports_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = but("small", weights_gb=2.0, resume_s=0.1, keep_alive=-1), but("large", weights_gb=14.5)
    links = LinkSpeeds(remote=0.1, ssd=5, device=20)
    run = simulation(
        small, but("other"), large, node={"count": 2, "ssd_gb": 100, "links": links}, capabilities=frozenset({"migrate"})
    )
    taken_at: list[float] = []
    reported_at: list[float] = []
    before_take, before_status = Instance.take, MeshNode.status

    def take(instance: Instance, request: Run) -> None:
        taken_at.append(run.world.clock.now)
        before_take(instance, request)

    def status(node: MeshNode, now: float) -> object:
        found = before_status(node, now)
        if taken_at and any(i.model == "small" and i.load.active for i in found.instances):
            reported_at.append(now)
        return found

    monkeypatch.setattr(Instance, "take", take)
    monkeypatch.setattr(MeshNode, "status", status)
    run.run([ask(0, "small", 601), ask(20, "large")])
    assert (run.outcome.migrations, len(taken_at)) == (1, 1)
    assert taken_at[0] < reported_at[0] <= taken_at[0] + LOADS_COALESCE_S + 1e-9


def test_cards_have_the_objectives_and_the_latency_sensitivity_of_models() -> None:
    spec = card_of("m", but("m", slo_tpot=0.2, percentile=0.9, sensitivity=3.0)).spec
    assert (spec.slo.ttft, spec.slo.tpot, spec.slo.percentile, spec.latency_sensitivity) == (10, 0.2, 0.9, 3.0)
    assert not card_of("m", but("m", has_ttft_objective=False)).spec.slo.is_set


@pytest.mark.parametrize(("has_objective", "first"), [(True, "urgent"), (False, "patient")])
def test_the_earlier_deadline_is_served_first(has_objective: bool, first: str) -> None:
    models = [but("busy"), but("patient", slo_ttft=1000), but("urgent", slo_ttft=30)]
    run = simulation(*(m.model_copy(update={"has_ttft_objective": has_objective}) for m in models), node={"ssd_gb": 100})
    run.run([ask(0, "busy", 200), ask(10, "patient"), ask(11, "urgent")])
    assert [s.model for s in run.outcome.served] == ["busy", first, "patient" if first == "urgent" else "urgent"]


def test_expected_models_are_weighted_by_their_latency_sensitivity() -> None:
    node = {"devices": 2, "memory": "separate", "links": LinkSpeeds(remote=1, ssd=5, device=20)}
    run = simulation(but("dear", sensitivity=10.0), but("cheap"), node=node, in_dram=True, capabilities=frozenset({"reuse"}))
    run.run([ask(at, model) for at in (0, 30, 60, 90) for model in ("dear", "cheap")])
    for residency in run.nodes["node-0"].residency.values():
        assert residency.likelihood["dear"] == pytest.approx(10 * residency.likelihood["cheap"])
        assert residency.likelihood["cheap"] > 0


@pytest.mark.parametrize("memory", ["unified", "separate"])
@pytest.mark.parametrize("dram", [True, False])
@pytest.mark.parametrize("ssd", [True, False])
@pytest.mark.parametrize("is_prefetch", [True, False])
def test_fetched_weights_are_cached_where_the_cluster_caches(memory: str, dram: bool, ssd: bool, is_prefetch: bool) -> None:
    # The disk of node-0 has the only copy.
    run = simulation(MODEL, node={"count": 2, "memory": memory, "ssd_gb": 15}, cache_dram=dram, cache_ssd=ssd)
    node, card = run.nodes["node-1"], card_of("m", MODEL)
    if is_prefetch:
        run.agents.weights.prefetch(node, PrefetchWeights(token=1, card=card))
    else:
        start = StartInstance(
            token=1, plan_id="p", instance_id="i", card=card, device_ids=("cuda:0",), reserve_bytes=15 * GB, kv_bytes=0
        )
        run.agents.weights.load(node, MeshInstance(start, Mock(), node.sim.devices[0], 0.0), Mock())
    run.world.clock.run(until=lambda: run.world.clock.now > 60)
    assert ("m" in node.sim.dram, "m" in node.sim.ssd) == (dram, ssd)
    status = node.loader_status()
    assert (status.dram_budget_bytes > 0, status.ssd_budget_bytes > 0) == (dram, ssd)


def test_a_cluster_that_caches_nothing_loads_from_its_source_each_time() -> None:
    run = simulation(MODEL, node={"ssd_gb": 5}, cache_dram=False, cache_ssd=False)
    run.run([ask(at, "m") for at in range(0, 200, 40)])
    assert run.outcome.loads == {"remote": 5}


def test_scheduler_ticks_every_second_while_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    before_tick = Simulation._tick

    def tick(run: Simulation) -> None:
        ticks.append(run.world.clock.now)
        before_tick(run)

    monkeypatch.setattr(Simulation, "_tick", tick)
    simulation(but("pinned", keep_alive=-1, has_ttft_objective=False)).run([ask(0, "pinned"), ask(60, "pinned")])
    quiet = [at for at in ticks if 20 < at < 59]
    assert [after - before for before, after in pairwise(quiet)] == pytest.approx([1.0] * (len(quiet) - 1))
    assert len(quiet) >= 38


@pytest.mark.parametrize(
    ("slo_tpot", "has_ttft_objective", "expected"),
    [
        (None, True, {"m": (3, 2), "huge": (1, 0)}),
        (0.05, False, {"m": (3, 1), "huge": (1, 0)}),
        (None, False, {}),
    ],
)
def test_gateway_reports_how_many_requests_met_their_objective(
    slo_tpot: float | None, has_ttft_objective: bool, expected: dict[str, tuple[int, int]]
) -> None:
    """The first request waits for a start, and a token takes 0.1 s; one response has one token.

    The huge model fits nowhere. The last request ends after the last report.
    """
    objective = {"slo_ttft": 1, "slo_tpot": slo_tpot, "has_ttft_objective": has_ttft_objective}
    run = simulation(but("m", keep_alive=-1, **objective), but("huge", weights_gb=30, **objective))
    run.run([ask(0, "m"), ask(5, "huge"), ask(20, "m"), ask(30, "m", output=1), ask(60, "m")])
    usages = [usage_of(found, run.state.models[name], run.world.clock.now) for name, found in run.state.slo_counts.items()]
    assert {u.model: (u.total, u.met) for u in usages} == expected
