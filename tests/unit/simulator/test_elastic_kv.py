"""KV caches with memory of their own, by hand.

Of b's requests the last one needs 6 GB, and the other models have 4 GB each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.domain.policies.common import arrivals, choose_soonest, evict_lru, keep_setting, one_each
from services.scheduler.domain.policies.port import Ask, Clearance, DeviceView, Profile
from simulator.config import Batching, ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.simulate import simulate
from simulator.workloads.request import Request

PLAIN = Profile("plain", arrivals, evict_lru, choose_soonest, keep_setting, one_each)
SERVICE = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=2)
LEAVE_S = 1.0


def cluster(device_gb: float, **runtime: object) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=5, device=20)
    node = NodeGroup(devices=1, device_gb=device_gb, dram_gb=100, links=links)
    settings = {"in_dram": True, "elastic_kv": True, "startup": Startup(leave_s=LEAVE_S), **runtime}
    return ClusterFile(nodes=(node,), runtime=Runtime.model_validate(settings))


def model(name: str, **more: object) -> ModelGroup:
    return ModelGroup.model_validate({"name": name, "weights_gb": 4, "service": Fixed(seconds=1), "slo_ttft": 10, **more})


B = model("b", weights_gb=8, service=SERVICE, kv_mb_per_token=10)
FIRST, LAST = Request(0, "b", 100, 1), Request(36.5, "b", 100, 500)


@pytest.mark.parametrize(("others", "device_gb"), [("acd", 20), ("ac", 16)])
def test_idle_instances_leave_for_the_memory_that_leaving_ones_do_not_free(others: str, device_gb: float) -> None:
    """a has been leaving since 36.2 s, after its keep-alive. Beside its 4 GB those of c suffice."""
    models = [B, *(model(name, keep_alive=30 if name == "a" else 300) for name in others)]
    requests = [FIRST, *(Request(5 + 2 * n, name, 1, 1) for n, name in enumerate(others)), LAST]
    outcome = simulate(cluster(device_gb), models, requests, PLAIN)
    assert outcome.stops == 2
    assert outcome.served[-1].queued == pytest.approx(LEAVE_S)


@pytest.mark.parametrize(("can", "suspensions"), [(frozenset({"suspend"}), 1), (frozenset(), 0)])
def test_kv_cache_displaces_instances_only_in_ways_that_the_system_has(can: frozenset[str], suspensions: int) -> None:
    def suspend_lru(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
        found = evict_lru(ask, device, short, now)
        return replace(found, how="suspend") if found is not None else None

    profile = replace(PLAIN, clear=suspend_lru, uses=frozenset({"suspend"}))
    outcome = simulate(cluster(16, capabilities=can), [B, model("a")], [FIRST, Request(5, "a", 1, 1), LAST], profile)
    assert (outcome.suspensions, outcome.stops) == (suspensions, 1 - suspensions)
    assert len(outcome.served) == 3
