"""The scheduler's decisions on simulated devices.

Results are computed by hand; invariants hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config import (
    GB,
    Batching,
    ClusterFile,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
    names_of,
)
from simulator.mesh.machine import MeshNode
from simulator.mesh.run import Simulation
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.workloads.synthetic import Synthetic, synthetic

LINKS = LinkSpeeds(remote=1, ssd=5, device=20, sequential=frozenset({"ssd"}))
NODES = NodeGroup(count=2, devices=2, device_gb=20, dram_gb=100, ssd_gb=100, links=LINKS)
RUNTIME = Runtime(
    startup=Startup(container_s=1, init_s=0.5, leave_s=0.3), message_ms=0, timeout_s=1e6, capabilities=frozenset({"preempt"})
)
CLUSTER = ClusterFile(nodes=(NODES,), runtime=RUNTIME)


def but(**other: object) -> ClusterFile:
    """Return the cluster with changed nodes."""
    return CLUSTER.model_copy(update={"nodes": (NODES.model_copy(update=other),)})


BIG = ModelGroup(name="big", copies=6, weights_gb=10, kv_gb=5, service=Fixed(seconds=2), slo_ttft=10)


def run(requests: Sequence[Request], *, groups: Sequence[ModelGroup] = (BIG,), cluster: ClusterFile = CLUSTER) -> Outcome:
    return Simulation(cluster, groups).run(requests)


def ask(at: float, model: str = "big-0", prompt: int = 1, output: int = 1) -> Request:
    return Request(at, model, prompt, output)


def test_cold_start_takes_its_slowest_link_and_a_warm_request_no_time() -> None:
    served = run([ask(0), ask(100)]).served
    assert [round(s.queued, 6) for s in served] == [2.5, 0.0]  # 10 GB at 5 GB/s, then 0.5 s; the engine has started by then
    assert served[0].ttft == pytest.approx(4.5)


def test_evicted_models_load_from_memory_and_uncached_ones_from_the_source() -> None:
    brief = BIG.model_copy(update={"keep_alive": 1.0})
    outcome = run([ask(0), ask(60)], groups=[brief])
    assert outcome.loads == {"ssd": 1, "dram": 1}
    assert [round(s.queued, 6) for s in outcome.served] == [2.5, 1.5]  # the engine takes a second, the bus half of one
    bare = but(ssd_gb=0, dram_gb=0)
    assert [round(s.queued, 6) for s in run([ask(0)], cluster=bare).served] == [10.5]


@pytest.mark.parametrize(("sequential", "queued"), [(True, [2.5, 4.5]), (False, [4.5, 4.5])])
def test_loads_of_one_node_share_its_disk_or_run_sequentially(sequential: bool, queued: list[float]) -> None:
    links = LINKS if sequential else LINKS.model_copy(update={"sequential": frozenset()})
    served = run([ask(0, "big-0"), ask(0, "big-1")], cluster=but(count=1, links=links)).served
    assert [round(s.queued, 6) for s in served] == queued


def test_longest_idle_instance_is_evicted_if_there_is_no_room() -> None:
    models = [f"big-{n}" for n in range(5)]  # four devices, one each
    outcome = run([ask(10.0 * n, m) for n, m in enumerate(models)])
    assert outcome.stops == 1
    assert outcome.served[4].queued == pytest.approx(2.8, abs=0.3)  # stopping, then as any other


def test_a_batching_engine_prefills_and_decodes() -> None:
    service = Batching(prefill_tokens_per_second=1000, tpot_ms=10, tpot_ms_more=5, concurrency=2)
    group = ModelGroup(name="chat", weights_gb=1, kv_gb=1, service=service, slo_ttft=1.0)
    requests = [ask(0, "chat", 100, 11), ask(50, "chat", 100, 11), ask(50, "chat", 100, 11), ask(50, "chat", 100, 1)]
    served = sorted(run(requests, groups=[group]).served, key=lambda s: s.number)
    assert [round(s.ttft - s.queued, 6) for s in served] == [0.1, 0.1, 0.2, 0.1]  # prompts one after the other
    # The first of the two has 0.1 s alone, 10 tokens, and ends: the other then runs alone.
    assert served[3].queued == pytest.approx(0.2, abs=0.06)
    assert [s.in_time for s in served] == [False, True, True, True]


def test_model_that_fits_nowhere_fails_its_requests() -> None:
    huge = BIG.model_copy(update={"weights_gb": 30.0, "copies": 1})
    outcome = run([ask(0, "big"), ask(1, "big")], groups=[huge])
    assert (outcome.failed, outcome.lost, outcome.served) == (2, 0, [])


@settings(max_examples=5, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 2.0),
    st.sampled_from([0.5, 1.0, 8.0]),
    st.sampled_from([-1.0, 2.0, 300.0]),
    st.integers(1, 2),
)
def test_no_request_is_lost_and_no_memory_overbooked_under_any_workload(
    seed: int, rps: float, cv: float, keep_alive: float, replicas: int
) -> None:
    groups = [BIG.model_copy(update={"keep_alive": keep_alive, "replicas_max": replicas})]
    requests = synthetic(Synthetic(rps, 60, cv), names_of(groups), seed)
    before = MeshNode.status
    booked: list[int] = []

    def watched(node: MeshNode, now: float) -> object:
        booked.extend(node.sum_reserved(d) for d in node.sim.devices)
        return before(node, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshNode, "status", watched)
        first, again = run(requests, groups=groups), run(requests, groups=groups)
    assert (first.lost, first.failed) == (0, 0)
    assert len(first.served) == len(requests)
    assert max(booked, default=0) <= NODES.device_gb * GB
    assert all(s.queued >= -1e-9 for s in first.served)
    assert first == again
