"""The simulated controller: results computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

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


def test_longest_idle_instance_is_evicted_if_there_is_no_room() -> None:
    outcome = run([ask(10.0 * n, f"big-{n}") for n in range(5)])  # four devices, one each
    assert outcome.stops == 1
    assert outcome.served[4].queued == pytest.approx(2.75)  # stopping, then as any other


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
