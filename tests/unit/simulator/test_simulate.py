"""The simulated controller: results computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.common import (
    arrivals,
    choose_soonest,
    evict_lru,
    keep_setting,
    one_each,
)
from services.scheduler.domain.policies.port import Profile
from simulator.config import (
    Batching,
    ClusterFile,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
)
from simulator.report import Outcome
from simulator.simulate import simulate
from simulator.workloads.request import Request

LINKS = LinkSpeeds(remote=1, ssd=5, device=20)
NODES = NodeGroup(count=2, devices=2, device_gb=20, dram_gb=100, ssd_gb=100, links=LINKS)
RUNTIME = Runtime(startup=Startup(container_s=1, init_s=0.5, leave_s=0.25))
CLUSTER = ClusterFile(nodes=(NODES,), runtime=RUNTIME)
BIG = ModelGroup(name="big", copies=6, weights_gb=10, kv_gb=5, service=Fixed(seconds=2), slo_ttft=10)
PLAIN = Profile("plain", arrivals, evict_lru, choose_soonest, keep_setting, one_each)


def run(requests: Sequence[Request], *, groups: Sequence[ModelGroup] = (BIG,), cluster: ClusterFile = CLUSTER) -> Outcome:
    return simulate(cluster, groups, requests, PLAIN)


def ask(at: float, model: str = "big-0", prompt: int = 1, output: int = 1) -> Request:
    return Request(at, model, prompt, output)


def but(**other: object) -> ClusterFile:
    return CLUSTER.model_copy(update={"nodes": (NODES.model_copy(update=other),)})


def test_cold_start_takes_its_slowest_link_and_a_warm_request_no_time() -> None:
    served = run([ask(0), ask(100)]).served
    assert [s.queued for s in served] == pytest.approx([2.5, 0.0])  # 10 GB at 5 GB/s, then 0.5 s; the engine has started by then
    assert served[0].ttft == pytest.approx(4.5)


def test_evicted_models_load_from_memory_and_uncached_ones_from_the_source() -> None:
    brief = BIG.model_copy(update={"keep_alive": 1.0})
    outcome = run([ask(0), ask(60)], groups=[brief])
    assert {k: v for k, v in outcome.loads.items() if v} == {"ssd": 1, "dram": 1}
    assert [s.queued for s in outcome.served] == pytest.approx(
        [2.5, 2.0]
    )  # the engine takes a second, the bus half of one behind it
    assert [s.queued for s in run([ask(0)], cluster=but(ssd_gb=0, dram_gb=0)).served] == pytest.approx([10.5])


def test_request_that_waits_only_for_a_slot_is_not_cold() -> None:
    """Each takes 2 s, one after another. The first two wait for the start."""
    outcome = run([ask(0), ask(1), ask(10), ask(10)])
    assert [s.queued for s in outcome.served] == pytest.approx([2.5, 3.5, 0, 2])
    assert [s.cold for s in outcome.served] == [True, True, False, False]


def test_weights_that_were_read_from_a_disk_are_the_last_to_be_evicted_from_it() -> None:
    """The disk has room for two models: the third replaces the one that no start has read."""
    node = NODES.model_copy(update={"count": 1, "devices": 1, "dram_gb": 0, "ssd_gb": 20})
    cluster = CLUSTER.model_copy(update={"nodes": (node,)})
    asks = [ask(0), ask(10, "big-2"), ask(40)]
    outcome = run(asks, groups=[BIG.model_copy(update={"keep_alive": 1})], cluster=cluster)
    assert {k: v for k, v in outcome.loads.items() if v} == {"ssd": 2, "remote": 1}
    assert outcome.served[-1].queued == pytest.approx(2.5)


@pytest.mark.parametrize(("tier", "dram_gb", "ssd_gb"), [("ssd", 0, 20), ("dram", 20, 0)])
def test_less_popular_models_are_evicted_first_of_those_that_no_start_has_read(tier: str, dram_gb: int, ssd_gb: int) -> None:
    """There is room for the two most popular models; the third replaces the second."""
    node = NODES.model_copy(update={"count": 1, "devices": 1, "dram_gb": dram_gb, "ssd_gb": ssd_gb})
    cluster = ClusterFile(nodes=(node,), runtime=RUNTIME.model_copy(update={"in_dram": True}))
    outcome = run([ask(0, "big-2"), ask(40, "big-0")], groups=[BIG.model_copy(update={"keep_alive": 1})], cluster=cluster)
    assert {k: v for k, v in outcome.loads.items() if v} == {"remote": 1, tier: 1}


@pytest.mark.parametrize(("has_objective", "first"), [(True, "urgent"), (False, "patient")])
def test_model_without_an_objective_for_the_first_token_has_no_deadline(has_objective: bool, first: str) -> None:
    """Two models wait for the device of a busy one; the second one's objective is nearer."""
    node = NODES.model_copy(update={"count": 1, "devices": 1})
    cluster = ClusterFile(nodes=(node,), runtime=RUNTIME.model_copy(update={"capabilities": frozenset()}))
    objectives = {"busy": 10.0, "patient": 1000.0, "urgent": 60.0}
    groups = [
        BIG.model_copy(update={"name": n, "copies": 1, "slo_ttft": s, "has_ttft_objective": has_objective})
        for n, s in objectives.items()
    ]
    groups[0] = groups[0].model_copy(update={"service": Fixed(seconds=20)})
    outcome = simulate(cluster, groups, [ask(0, "busy"), ask(10, "patient"), ask(11, "urgent")], thaw.PROFILE)
    assert [s.model for s in outcome.served] == ["busy", first, "patient" if first == "urgent" else "urgent"]


def test_longest_idle_instance_is_evicted_if_there_is_no_room() -> None:
    outcome = run([ask(10.0 * n, f"big-{n}") for n in range(5)])  # four devices, one each
    assert outcome.stops == 1
    assert outcome.served[4].queued == pytest.approx(2.75)  # stopping, then as any other


@pytest.mark.parametrize(("share_compute", "large_s", "small_s"), [("turns", 3.0, 2.0), ("memory", 2.15, 2.5), ("none", 2.0, 1.0)])
def test_prompts_speed_up_and_slow_down_with_the_busy_instances(share_compute: str, large_s: float, small_s: float) -> None:
    """The large model has 1.5 s to compute when the small one begins its 1 s.

    In turns, both have half of the device until the small one is done after 2 s. By memory, the
    small one has an eleventh of it until the large one is done, 1.65 s later, and then all of it.
    """
    large, small = (
        ModelGroup(name=name, weights_gb=gb, service=Fixed(seconds=seconds), slo_ttft=9)
        for name, gb, seconds in (("large", 10, 2), ("small", 1, 1))
    )
    runtime = Runtime.model_validate({"share_compute": share_compute, "in_dram": True})
    cluster = ClusterFile(nodes=(NODES.model_copy(update={"count": 1, "devices": 1}),), runtime=runtime)
    requests = [ask(0, "large"), ask(10, "small"), ask(100, "large"), ask(100.5, "small")]
    ttft = {(s.model, s.at): s.ttft for s in run(requests, groups=[large, small], cluster=cluster).served}
    assert ttft["large", 100] == pytest.approx(large_s)
    assert ttft["small", 100.5] == pytest.approx(small_s)


def test_share_compute_accepts_the_values_of_earlier_versions() -> None:
    assert [Runtime.model_validate({"share_compute": v}).share_compute for v in (True, False)] == ["memory", "none"]


def test_a_batching_engine_prefills_and_decodes() -> None:
    service = Batching(prefill_tokens_per_second=1000, tpot_ms=10, tpot_ms_more=10, concurrency=2)
    group = ModelGroup(name="chat", weights_gb=1, kv_gb=1, service=service, slo_ttft=1.0)
    asks = [ask(0, "chat", 100, 11), ask(50, "chat", 100, 11), ask(50, "chat", 100, 11)]
    served = run(asks, groups=[group]).served
    assert [s.ttft - s.queued for s in served] == pytest.approx([0.1, 0.1, 0.2])
    assert served[0].tpot == pytest.approx(0.01)
    # The first of the two has all its ten tokens when the second one's prompt is done.
    assert [s.tpot for s in served[1:]] == pytest.approx([0.01, 0.01])


def test_waiting_prompts_are_computed_in_one_pass() -> None:
    service = Batching(prefill_tokens_per_second=1000, prefill_ms=50, prefill_together=True, tpot_ms=10, concurrency=8)
    group = ModelGroup(name="chat", weights_gb=1, kv_gb=1, service=service, slo_ttft=1.0)
    served = sorted(
        run([ask(at, "chat", 100, 2) for at in (0, 50, 50.05, 50.05, 50.1)], groups=[group]).served, key=lambda s: s.number
    )
    # The first request is computed alone, in 50 ms and 100 for the prompt; later ones wait for the
    # next pass, over all three.
    assert [round(s.at + s.ttft, 6) for s in served[1:]] == [50.15, 50.5, 50.5, 50.5]


def test_model_that_fits_nowhere_fails_its_requests() -> None:
    huge = BIG.model_copy(update={"weights_gb": 30.0, "copies": 1})
    outcome = run([ask(0, "big"), ask(1, "big")], groups=[huge])
    assert (outcome.failed, outcome.lost, outcome.served) == (2, 0, [])
