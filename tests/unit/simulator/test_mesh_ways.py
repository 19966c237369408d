"""The scheduler on machines that suspend, migrate and fail.

Results are computed by hand; invariants hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.profiles import profile_named
from shared.contracts.loader import PrefetchWeights
from shared.contracts.node import InstanceState, ResumeInstance, StopInstance, SuspendInstance
from simulator.clock import Clock
from simulator.config import (
    GB,
    Batching,
    ClusterFile,
    Failure,
    Failures,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
    names_of,
)
from simulator.mesh.agents import Agents
from simulator.mesh.machine import MeshNode
from simulator.mesh.run import Simulation, card_of
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.workloads.synthetic import Synthetic, synthetic

SERVICE = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=4)
MODEL = ModelGroup(name="m", weights_gb=10, kv_gb=5, service=SERVICE, slo_ttft=10, keep_alive=-1)


def machines(
    count: int,
    *,
    can: frozenset[str] = frozenset(),
    failures: Failures | None = None,
    runtime: dict[str, object] | None = None,
    **more: object,
) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=5, device=20)
    node = NodeGroup.model_validate(
        {"count": count, "devices": 1, "device_gb": 20, "dram_gb": 100, "ssd_gb": 100, "links": links, **more}
    )
    startup = Startup(container_s=4, init_s=0.5, leave_s=0.3, restore_s=0.2)
    with_all = {"startup": startup, "message_ms": 0, "capabilities": can, **(runtime or {})}
    return ClusterFile(nodes=(node,), runtime=Runtime.model_validate(with_all), failures=failures or Failures())


def ask(at: float, model: str, output: int = 2) -> Request:
    return Request(at, model, 100, output)


def run(cluster: ClusterFile, models: Sequence[ModelGroup], requests: Sequence[Request], profile: str = "thaw") -> Outcome:
    return Simulation(cluster, models, profile_named(profile)).run(requests)


def test_suspended_instance_is_resumed_from_its_snapshot() -> None:
    requests = [ask(0, "m-0"), ask(60, "m-1"), ask(120, "m-0")]
    pair = [MODEL.model_copy(update={"copies": 2})]
    outcome = run(machines(1, can=frozenset({"suspend"})), pair, requests)
    served = sorted(outcome.served, key=lambda s: s.at)
    assert (outcome.suspensions, outcome.stops) == (2, 0)
    assert outcome.loads == {"ssd": 2, "snapshot": 1}
    assert served[0].queued == pytest.approx(4.5)
    # 10 GB to host memory and the proof, then 10 GB back and the other costs of a restoration.
    assert served[2].queued == pytest.approx(0.5 + 0.3 + 0.5 + 0.2, abs=0.3)
    without = run(machines(1), pair, requests)
    assert (without.suspensions, without.stops) == (0, 2)
    assert sorted(without.served, key=lambda s: s.at)[2].queued == pytest.approx(0.3 + 4.5, abs=0.3)


def test_instance_without_room_for_its_snapshot_is_stopped() -> None:
    outcome = run(
        machines(1, can=frozenset({"suspend"}), dram_gb=11),
        [MODEL.model_copy(update={"copies": 2})],
        [ask(0, "m-0"), ask(60, "m-1")],
    )
    assert (outcome.suspensions, outcome.stops) == (0, 1)
    assert len(outcome.served) == 2


@pytest.mark.parametrize(("ahead", "queued"), [(None, 10.5), ("m-0", 6.5), ("m-1", 10.5)])
def test_prefetched_bytes_are_not_fetched_again_and_other_prefetches_yield(ahead: str | None, queued: float) -> None:
    pair = [MODEL.model_copy(update={"copies": 2})]
    simulation = Simulation(machines(1, ssd_gb=0), pair, profile_named("thaw"))
    if ahead is not None:
        order = PrefetchWeights(token=1, card=card_of(ahead, pair[0]))
        simulation.world.clock.at(1.0, lambda: simulation.agents.weights.prefetch(simulation.nodes["node-0"], order))
    (served,) = simulation.run([ask(5, "m-0")]).served
    assert served.queued == pytest.approx(queued)  # 10 GB over 1 GB/s, four of them in the four seconds before


@pytest.mark.parametrize("profile", ["thaw", "serverlessllm"])
def test_serving_instance_is_migrated_with_its_tokens(profile: str) -> None:
    # Only node-0's disk has the large one, and the small one serves there; on node-1 either needs a
    # remote fetch.
    small = MODEL.model_copy(update={"name": "small", "weights_gb": 2.0, "resume_s": 0.1})
    other, large = small.model_copy(update={"name": "other"}), MODEL.model_copy(update={"name": "large", "weights_gb": 14.5})
    cluster = machines(2, can=frozenset({"migrate"}), links=LinkSpeeds(remote=0.1, ssd=5, device=20))
    outcome = run(cluster, [small, other, large], [ask(0, "small", 601), ask(20, "large")], profile)
    moved, preempting = sorted(outcome.served, key=lambda s: s.at)
    assert (outcome.migrations, outcome.preemptions, outcome.restarts) == (1, 0, 0)
    assert preempting.queued == pytest.approx(20.5 + 0.7 + 0.3 + 4.5, abs=1.5)  # fetched, migrated in rounds, stopped, then loaded
    assert 0.1 <= moved.pause <= 0.5
    assert moved.ended == pytest.approx(moved.queued + 0.1 + 60.0 + moved.pause, abs=0.2)


def test_rounds_of_a_migration_take_as_long_as_the_destination_computes() -> None:
    """The 460 tokens at 40.5 s take 4.7 s there, and the next 47 ones 0.57 s."""
    slow = SERVICE.model_copy(update={"prefill_tokens_per_second": 100})
    small = MODEL.model_copy(update={"name": "small", "weights_gb": 2.0, "resume_s": 0.1, "services": {"slow": slow}})
    other, large = small.model_copy(update={"name": "other"}), MODEL.model_copy(update={"name": "large", "weights_gb": 14.5})
    cluster = machines(1, can=frozenset({"migrate"}), links=LinkSpeeds(remote=0.1, ssd=5, device=20))
    (fast,) = cluster.nodes
    cluster = cluster.model_copy(update={"nodes": (fast, fast.model_copy(update={"name": "slow", "kind": "slow", "ssd_gb": 0}))})
    outcome = run(cluster, [small, other, large], [ask(0, "small", 601), ask(20, "large")])
    assert outcome.migrations == 1
    large_served = next(s for s in outcome.served if s.model == "large")
    assert large_served.queued == pytest.approx(20.5 + 4.7 + 0.57 + 0.3 + 4.5, abs=0.3)


def test_migration_may_take_longer_than_an_order_that_no_migrator_claims() -> None:
    small = MODEL.model_copy(update={"name": "small", "weights_gb": 2.0, "resume_s": 12.0})
    large = MODEL.model_copy(update={"name": "large", "weights_gb": 14.5})
    cluster = machines(2, can=frozenset({"migrate"}), links=LinkSpeeds(remote=0.1, ssd=5, device=20))
    outcome = run(cluster, [small, small.model_copy(update={"name": "other"}), large], [ask(0, "small", 901), ask(20, "large")])
    assert (outcome.migrations, len(outcome.served), outcome.lost) == (1, 2, 0)


def test_least_recently_suspended_instance_is_stopped_for_a_new_snapshot() -> None:
    """Host memory has room for two: of m-0 and m-1, then m-1 and m-2, then m-2 and m-3."""
    requests = [ask(60.0 * n, f"m-{model}") for n, model in enumerate((0, 1, 2, 3, 2))]
    cluster = machines(1, can=frozenset({"suspend"}), runtime={"cache_dram": False}, dram_gb=22)
    outcome = run(cluster, [MODEL.model_copy(update={"copies": 4})], requests)
    assert outcome.loads == {"ssd": 4, "snapshot": 1}
    assert (outcome.suspensions, outcome.stops) == (4, 2)


def test_requests_of_an_instance_that_drains_for_a_minute_continue_later() -> None:
    """It drains for the other model after `preempt_after_s`, and would serve for 200 s."""
    models = [MODEL, MODEL.model_copy(update={"name": "other"})]
    outcome = run(machines(1, can=frozenset({"preempt"})), models, [ask(0, "m", 2000), ask(10, "other")])
    long, other = sorted(outcome.served, key=lambda s: s.at)
    assert (outcome.preemptions, outcome.lost, len(outcome.served)) == (1, 0, 2)
    assert other.queued == pytest.approx(15 + 60 + 0.3 + 4.5, abs=1)
    assert long.ended > other.ended
    assert long.pause > 4.5


def test_drain_timeout_of_an_earlier_suspension_ends_no_later_requests() -> None:
    """The first request ends at 14.6 s. The second one is served from about 21 s on, for 80 s."""
    simulation = Simulation(machines(1, can=frozenset({"suspend"})), [MODEL])
    (node,), agents, clock = simulation.nodes.values(), simulation.agents, simulation.world.clock

    def suspend() -> None:
        (instance,) = node.instances.values()
        assert (instance.state, len(instance.engine.runs)) == (InstanceState.READY, 1)
        agents.suspend(node, SuspendInstance(token=99, instance_id=instance.key))

    clock.at(10.0, suspend)
    clock.at(50.0, suspend)
    outcome = simulation.run([ask(0, "m", 100), ask(20, "m", 800)])
    assert (outcome.preemptions, outcome.loads) == (0, {"ssd": 1, "snapshot": 1})
    assert [s.pause for s in outcome.served] == [0, 0]


@pytest.mark.parametrize("failover", ["resume", "restart"])
def test_requests_of_a_failed_node_are_resumed_on_another(failover: str) -> None:
    failures = Failures(events=(Failure(node="node-0", at=10, seconds=30),))
    cluster = machines(2, failures=failures, runtime={"failover": failover, "ssd_copies": "full"})
    outcome = run(cluster, [MODEL], [ask(0, "m", 101)])
    (served,) = outcome.served
    assert (outcome.restarts, outcome.loads) == (1, {"ssd": 2})
    # The gateway asks after ten seconds of silence, when the scheduler has long marked the node
    # lost. Then a start.
    ready = pytest.approx(20.3 + 4.5, abs=0.3)
    tokens = {"resume": 55, "restart": 0}[failover]
    prompt = (100 + tokens) / 1000
    assert served.ended - (101 - (tokens or 1)) * 0.1 - prompt == ready
    assert served.pause > 14


def test_request_that_a_failed_node_interrupted_waits_no_longer_than_the_time_out() -> None:
    failures = Failures(events=(Failure(node="node-0", at=10, seconds=1000),))
    cluster = machines(1, failures=failures, runtime={"timeout_s": 6})
    outcome = run(cluster, [MODEL], [ask(0, "m", 101)])
    assert (outcome.timed_out, outcome.lost, outcome.restarts) == (1, 0, 1)
    assert outcome.ended_at == pytest.approx(10 + 10.3 + 6)


def test_resumption_that_is_stopped_counts_as_device_time() -> None:
    """It takes 0.7 s, and is stopped after half a second; the node needs 0.3 s for that."""
    device_seconds = []
    for is_resumed in (False, True):
        simulation = Simulation(machines(1, can=frozenset({"suspend"})), [MODEL.model_copy(update={"keep_alive": 5})])
        (node,), agents, clock = simulation.nodes.values(), simulation.agents, simulation.world.clock

        def resume_and_stop(node: MeshNode = node, agents: Agents = agents, clock: Clock = clock) -> None:
            (instance,) = node.instances.values()
            assert instance.state is InstanceState.SUSPENDED
            agents.resume(node, ResumeInstance(token=99, instance_id=instance.key, plan_id="p"))
            clock.call_later(0.5, lambda: agents.stop(node, StopInstance(token=100, instance_id=instance.key)))

        if is_resumed:
            clock.at(60.0, resume_and_stop)
        device_seconds.append(simulation.run([ask(0, "m"), ask(120, "m")]).device_seconds)
    assert device_seconds[1] - device_seconds[0] == pytest.approx(0.5 + 0.3 + 4.5 - 0.7, abs=0.3)


def test_a_recovered_node_is_used_again() -> None:
    failures = Failures(events=(Failure(node="node-0", at=10, seconds=20),))
    outcome = run(machines(1, failures=failures), [MODEL], [ask(0, "m"), ask(40, "m")])
    first, second = outcome.served
    assert outcome.loads == {"ssd": 2}
    assert [first.queued, second.queued] == pytest.approx([4.5, 4.5], abs=0.3)


@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.05, 1.0),
    st.sampled_from([1.0, 4.0]),
    st.sampled_from([-1.0, 5.0]),
    st.sampled_from(
        [frozenset({"preempt"}), frozenset({"suspend", "preempt"}), frozenset({"suspend", "migrate", "preempt", "sleep"})]
    ),
    st.sampled_from([None, 60.0]),
    st.sampled_from(["thaw", "serverlessllm", "swapservellm", "lru"]),
)
def test_no_request_is_lost_with_any_set_of_capabilities(
    seed: int, rps: float, cv: float, keep_alive: float, can: frozenset[str], mtbf: float | None, profile: str
) -> None:
    groups = [MODEL.model_copy(update={"copies": 5, "keep_alive": keep_alive})]
    requests = synthetic(Synthetic(rps, 60, cv, prompt_tokens=100, output_tokens=40), names_of(groups), seed)
    cluster = machines(
        2, can=can, failures=Failures(mtbf_s=mtbf, mttr_s=20), devices=2, runtime={"timeout_s": 1e5, "message_ms": 1}
    )
    before, booked = MeshNode.status, list[int]()

    def watched(node: MeshNode, now: float) -> object:
        booked.extend(node.sum_reserved(d) for d in node.sim.devices)
        return before(node, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshNode, "status", watched)
        first, again = (run(cluster, groups, requests, profile) for _ in range(2))
    assert max(booked, default=0) <= 20 * GB
    assert first.lost == 0
    if mtbf is None:
        assert len(first.served) == len(requests)
    assert all(s.queued >= -1e-9 for s in first.served)
    assert first == again
