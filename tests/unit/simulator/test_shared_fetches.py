"""Instances of one node that need the same weights share one fetch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.domain.policies.common import arrivals, choose_soonest, evict_lru, keep_setting, per_request
from services.scheduler.domain.policies.port import Profile
from simulator.clock import Clock
from simulator.config import ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime
from simulator.instances import SimNode
from simulator.shared_fetches import Fetches
from simulator.simulate import simulate
from simulator.workloads.request import Request

GROUP = NodeGroup(devices=2, device_gb=20, dram_gb=100, links=LinkSpeeds(remote=1, ssd=1, device=20))
EAGER = Profile("eager", arrivals, evict_lru, choose_soonest, keep_setting, per_request)
WHOLE = ("n", "a", 0, 1)


def test_two_instances_of_one_model_on_one_node_share_a_fetch() -> None:
    two = ModelGroup(name="a", weights_gb=10, service=Fixed(seconds=60), slo_ttft=20, replicas_max=2)
    outcome = simulate(ClusterFile(nodes=(GROUP,)), [two], [Request(0, "a", 1, 1), Request(4, "a", 1, 1)], EAGER)
    first, second = sorted(outcome.served, key=lambda s: s.at)
    assert outcome.loads == {"remote": 2}
    assert [first.queued, second.queued] == pytest.approx([10, 6])


def test_two_of_different_models_share_the_link() -> None:
    models = [ModelGroup(name=n, weights_gb=10, service=Fixed(seconds=1), slo_ttft=20) for n in "ab"]
    outcome = simulate(ClusterFile(nodes=(GROUP,)), models, [Request(0, "a", 1, 1), Request(0, "b", 1, 1)], EAGER)
    assert [s.queued for s in outcome.served] == pytest.approx([20, 20])


def test_fetch_continues_for_remaining_readers_and_stops_with_the_last() -> None:
    clock = Clock()
    node, fetches, completed = SimNode("n", GROUP, clock), Fetches(), list[str]()
    leave = fetches.join(node, WHOLE, (node.nic,), 10e9, lambda: completed.append("first"))
    clock.at(5.0, leave)

    def join() -> None:
        fetches.join(node, WHOLE, (node.nic,), 10e9, lambda: completed.append("second"))

    clock.at(4.0, join)
    clock.run(until=lambda: clock.now >= 10.0)
    assert completed == ["second"]
    assert not fetches.under_way(WHOLE)

    alone = fetches.join(node, WHOLE, (node.nic,), 10e9, lambda: completed.append("third"))
    assert fetches.estimate_seconds(node, "a", (node.nic,), 10e9) == pytest.approx(10.0)
    alone()
    assert not node.network.flows
    assert completed == ["second"]


def test_reader_that_lacks_more_than_a_fetch_covers_has_the_rest_fetched_afterwards() -> None:
    clock = Clock()
    node, fetches, completed = SimNode("n", GROUP, clock), Fetches(), dict[str, float]()

    def join(name: str, nbytes: float, lacking: float | None = None) -> None:
        fetches.join(node, WHOLE, (node.nic,), nbytes, lambda: completed.update({name: clock.now}), lacking=lacking)

    join("part", 4e9)
    clock.at(1.0, lambda: join("whole", 10e9))
    clock.at(2.0, lambda: join("smaller part", 3e9))
    clock.run(until=lambda: clock.now >= 2.0)
    assert fetches.estimate_seconds(node, "a", (node.nic,), 10e9) == pytest.approx(2 + 6)
    clock.run()
    assert completed == pytest.approx({"part": 4.0, "smaller part": 4.0, "whole": 10.0})

    completed.clear()
    join("after a prefetch of the rest", 2e9, 10e9)
    join("whole", 10e9)
    clock.run()
    assert completed == pytest.approx({"after a prefetch of the rest": 12.0, "whole": 12.0})


def test_loads_of_what_two_devices_lack_share_the_fetch_into_the_cache_of_the_disk() -> None:
    """Others displace 4 of the model's 10 GB on both devices, and the model from the disk."""
    profile = replace(EAGER, uses=frozenset({"reuse"}))
    node = GROUP.model_copy(update={"ssd_gb": 14.0})
    model = ModelGroup(name="a", weights_gb=10, service=Fixed(seconds=1), slo_ttft=20, keep_alive=1, replicas_max=2)
    other = model.model_copy(update={"name": "b", "weights_gb": 14.0})
    requests = [Request(at, name, 1, 1) for at, name in ((0, "a"), (0, "a"), (30, "b"), (30, "b"), (90, "a"), (90, "a"))]
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(cache_dram=False))
    outcome = simulate(cluster, [model, other], requests, profile)
    assert (outcome.loads["reuse"], outcome.lost) == (2, 0)
    assert [s.queued for s in outcome.served if s.at == 90] == pytest.approx([4.0, 4.0])
