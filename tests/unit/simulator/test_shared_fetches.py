"""Instances of one node that need the same weights share one fetch."""

from __future__ import annotations

import pytest

from services.scheduler.domain.policies.common import arrivals, choose_soonest, evict_lru, keep_setting, per_request
from services.scheduler.domain.policies.port import Profile
from simulator.clock import Clock
from simulator.config import ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup
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
