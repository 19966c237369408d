"""Predicted costs equal what happens: of victims, and of starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.common import (
    arrivals,
    choose_soonest,
    evict_lru,
    keep_setting,
    keep_until_needed,
    one_each,
)
from services.scheduler.domain.policies.port import Ask, Option, Profile, Resident
from simulator.config import Batching, ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.controller import Controller
from simulator.policies import tangram
from simulator.simulate import simulate
from simulator.workloads.request import Request
from simulator.world import World

PLAIN = Profile("plain", arrivals, evict_lru, choose_soonest, keep_setting, one_each)
LONG = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=1)


def cluster(runtime: Runtime, **more: object) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=5, device=20)
    node = {"devices": 1, "device_gb": 20, "dram_gb": 100, "links": links, **more}
    return ClusterFile(nodes=(NodeGroup.model_validate(node),), runtime=runtime)


def model(name: str, **more: object) -> ModelGroup:
    return ModelGroup.model_validate({"name": name, "weights_gb": 10, "service": Fixed(seconds=1), "slo_ttft": 10, **more})


def resident_at(at: float, machines: ClusterFile, models: list[ModelGroup], requests: list[Request]) -> Resident:
    """Return what the policy `thaw` sees on the first device at that time."""
    world = World(machines, models, thaw.PROFILE, 0)
    found: list[Resident] = []
    world.clock.at(at, lambda: found.extend(world.view(world.devices["node-0/0"]).residents))
    Controller(world).run(requests)
    return found[0]


@pytest.mark.parametrize(("snapshot_gb", "expected_s"), [(4, 0.1 + 4 / 20), (12, 3 + 10 / 20)])
def test_victim_costs_its_restore_if_it_would_be_suspended_and_otherwise_a_start(snapshot_gb: int, expected_s: float) -> None:
    """10 GB of host memory have room for a snapshot of 4 GB, in the place of the weights."""
    machines = cluster(Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1)), dram_gb=10)
    requests = [Request(0, "a", 1, 1), Request(60, "a", 1, 1)]
    found = resident_at(50, machines, [model("a", snapshot_gb=snapshot_gb)], requests)
    assert found.state == "idle"
    assert found.delay_s == pytest.approx(expected_s)


def test_victim_that_serves_costs_a_start_although_it_could_be_suspended_when_idle() -> None:
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1))
    found = resident_at(5, cluster(runtime), [model("a", service=LONG)], [Request(0, "a", 100, 101)])
    assert found.state == "serving"
    assert found.delay_s == pytest.approx(3 + 10 / 20)


def test_resuming_the_requests_of_a_preempted_instance_includes_no_start() -> None:
    """The other device is a migration target: the start there is part of the migration only."""
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3))
    found = resident_at(5.6, cluster(runtime, devices=2), [model("a", service=LONG)], [Request(0, "a", 100, 101)])
    assert found.moves
    assert found.resume_s == pytest.approx((100 + 21) / 1000, abs=0.002)


def errors(runtime: Runtime, models: list[ModelGroup], requests: list[Request], **node: object) -> list[float]:
    """Return what each start took beyond its prediction, where stopped instances leave weights."""
    profile = replace(PLAIN, uses=frozenset({"reuse"}))
    return simulate(cluster(runtime, **node), models, requests, profile).prediction_errors


@pytest.mark.parametrize("is_in_dram", [True, False])
def test_start_is_predicted_to_load_its_container_while_the_victim_leaves(is_in_dram: bool) -> None:
    """The container takes longer than the victim; a fetch begins when the victim is gone."""
    runtime = Runtime(in_dram=is_in_dram, startup=Startup(container_s=1, init_s=0.5, leave_s=0.25))
    found = errors(runtime, [model("a", kv_gb=5), model("b", weights_gb=15)], [Request(0, "a", 1, 1), Request(50, "b", 1, 1)])
    assert found == pytest.approx([0.0, 0.0])


def test_start_is_predicted_to_drop_reusable_weights_in_no_time() -> None:
    runtime = Runtime(in_dram=True, startup=Startup(leave_s=0.25))
    found = errors(runtime, [model("a", keep_alive=1), model("b", weights_gb=14)], [Request(0, "a", 1, 1), Request(50, "b", 1, 1)])
    assert found == pytest.approx([0.0, 0.0])


def test_start_is_predicted_to_merge_free_memory_while_its_weights_are_fetched() -> None:
    runtime = Runtime(merge_gb_per_second=100)
    found = errors(runtime, [model("a", keep_alive=1), model("b")], [Request(0, "a", 1, 1), Request(50, "b", 1, 1)])
    assert found == pytest.approx([0.0, 0.0])


def beside_predictions(machines: ClusterFile, models: list[ModelGroup], requests: list[Request]) -> list[tuple[float, float]]:
    """Return the predicted and the measured seconds of each request, on exclusive devices."""
    predicted: list[float] = []

    def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
        chosen = choose_soonest(ask, options, seed)
        predicted.extend([chosen.cost.total_s] if chosen is not None else [])
        return chosen

    profile = replace(PLAIN, choose=choose, keep=keep_until_needed, uses=frozenset({"peer_copy"}))
    served = simulate(machines, models, requests, profile).served
    return list(zip(predicted, [s.ttft for s in sorted(served, key=lambda s: s.number)], strict=True))


@pytest.mark.parametrize("late_execution", [True, False])
@pytest.mark.parametrize("container_s", [0.0, 1.0])
def test_exclusive_start_is_predicted_with_the_time_until_its_victim_is_gone(container_s: float, late_execution: bool) -> None:
    startup = Startup(container_s=container_s, init_s=2, leave_s=0.5)
    machines = cluster(Runtime(exclusive=True, late_execution=late_execution, in_dram=True, startup=startup))
    models = [model("a", weights_gb=15), model("b", weights_gb=15)]
    for predicted, measured in beside_predictions(machines, models, [Request(0, "a", 1, 1), Request(50, "b", 1, 1)]):
        assert predicted == pytest.approx(measured)


@pytest.mark.parametrize("late_execution", [True, False])
def test_peer_copy_is_predicted_with_the_time_until_its_victim_is_gone(late_execution: bool) -> None:
    links = LinkSpeeds(remote=1, ssd=5, device=20, peer=40)
    runtime = Runtime(exclusive=True, late_execution=late_execution, in_dram=True, startup=Startup(leave_s=0.5))
    requests = [Request(0, "a", 1, 1), Request(0, "b", 1, 1), Request(50, "a", 1, 1), Request(50.1, "a", 1, 1)]
    models = [model("a", weights_gb=15), model("b", weights_gb=15)]
    found = beside_predictions(cluster(runtime, devices=2, links=links), models, requests)
    assert len(found) == 4
    for predicted, measured in found:
        assert predicted == pytest.approx(measured)


def test_execution_counts_once_in_the_time_until_the_objective_on_exclusive_devices() -> None:
    """Near, b is there after 0.5 s and done 1 s later, within 2 s; far, it is loaded after 5 s."""
    node = {"devices": 1, "device_gb": 12, "dram_gb": 100}
    near = NodeGroup.model_validate({"name": "near", **node, "kind": "near", "links": LinkSpeeds(remote=1, ssd=1, device=20)})
    far = NodeGroup.model_validate({"name": "far", **node, "links": LinkSpeeds(remote=1, ssd=1, device=2)})
    machines = ClusterFile(nodes=(near, far), runtime=Runtime(exclusive=True, late_execution=False, in_dram=True))
    models = [model("a", kinds=["near"], sensitivity=100), model("b", slo_ttft=2)]
    outcome = simulate(machines, models, [Request(0, "a", 1, 1), Request(10, "b", 1, 1)], thaw.PROFILE)
    assert [s.ttft for s in outcome.served] == pytest.approx([1.5, 1.5])


def test_popularity_counts_arrivals_that_change_no_device() -> None:
    """All requests were for a until one for b arrives, which runs on another node."""
    node = {"devices": 1, "device_gb": 20, "dram_gb": 100, "links": LinkSpeeds(remote=1, ssd=1, device=20)}
    nodes = tuple(NodeGroup.model_validate({"name": name, "kind": name, **node}) for name in ("one", "two"))
    machines = ClusterFile(nodes=nodes, runtime=Runtime(in_dram=True))
    world = World(machines, [model("a", kinds=["one"]), model("b", kinds=["two"])], tangram.PROFILE, 0)
    found: list[float] = []
    for at in (30, 50):
        world.clock.at(at, lambda: found.extend(r.miss_probability for r in world.view(world.devices["one-0/0"]).residents))
    Controller(world).run([Request(0, "a", 1, 1), Request(40, "b", 1, 1), Request(60, "b", 1, 1)])
    assert found == pytest.approx([1.0, 0.5])
