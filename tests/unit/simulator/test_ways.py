"""Every option and every method of clearing a device, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.scheduler.domain.policies.common import (
    arrivals,
    choose_soonest,
    evict_lru,
    evict_none,
    keep_setting,
    keep_until_needed,
    one_each,
    per_request,
)
from services.scheduler.domain.policies.port import Ask, Option, Profile
from simulator.config import (
    Batching,
    ClusterFile,
    Failure,
    Failures,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
)
from simulator.controller import Controller
from simulator.policies import serverlessllm, shepherd, swapservellm
from simulator.report import Outcome
from simulator.simulate import simulate
from simulator.workloads.request import Request
from simulator.world import World

PLAIN = Profile("plain", arrivals, evict_lru, choose_soonest, keep_setting, one_each)
LONG2 = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=2)
LONG = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=1)


def cluster(
    runtime: Runtime | None = None, *, links: LinkSpeeds | None = None, failures: Failures | None = None, **more: float
) -> ClusterFile:
    speeds = links or LinkSpeeds(remote=1, ssd=5, device=20)
    node = NodeGroup.model_validate({"devices": 1, "device_gb": 20, "dram_gb": 100, "links": speeds, **more})
    return ClusterFile(nodes=(node,), runtime=runtime or Runtime(in_dram=True), failures=failures or Failures())


def model(name: str, **more: object) -> ModelGroup:
    return ModelGroup.model_validate({"name": name, "weights_gb": 10, "service": Fixed(seconds=1), "slo_ttft": 10, **more})


def ask(at: float, name: str, prompt: int = 100, output: int = 101) -> Request:
    return Request(at, name, prompt, output)


def loads(outcome: Outcome) -> dict[str, int]:
    return {k: v for k, v in outcome.loads.items() if v}


def pipelined(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
    return max(options, key=lambda o: (o.stages, -o.full_workers, o.key), default=None)


def test_remaining_tensors_are_reused() -> None:
    profile = replace(PLAIN, uses=frozenset({"reuse"}))
    models = [model("a", keep_alive=1), model("b", weights_gb=14, keep_alive=1)]
    outcome = simulate(cluster(), models, [ask(0, "a"), ask(10, "a"), ask(20, "b"), ask(30, "a")], profile)
    # 0.5 s for 10 GB; none; 14 GB leave 6 of the other's 10 GB there; 4 GB are missing
    assert [s.queued for s in outcome.served] == pytest.approx([0.5, 0.0, 0.7, 0.2])
    assert loads(outcome) == {"dram": 2, "reuse": 2}


def test_memory_caches_no_model_of_which_only_a_part_was_fetched() -> None:
    """Memory has room for one model; b has displaced a there, and 4 of its 10 GB on the device."""
    models, profile = [model("a", keep_alive=1), model("b", weights_gb=14, keep_alive=1)], replace(PLAIN, uses=frozenset({"reuse"}))
    machines, asks = cluster(Runtime(), dram_gb=14), [ask(0, "a"), ask(20, "b"), ask(50, "a")]
    assert held_in_memory(machines, models, asks, profile) == {"b"}
    assert simulate(machines, models, asks, profile).served[-1].queued == pytest.approx(4)


def test_moving_obstructing_regions_takes_the_configured_time() -> None:
    profile = replace(PLAIN, uses=frozenset({"reuse"}))
    runtime = Runtime(in_dram=True, merge_gb_per_second=100, merge_share=0.5)
    outcome = simulate(cluster(runtime), [model("a", keep_alive=1), model("b", weights_gb=4)], [ask(0, "a"), ask(10, "b")], profile)
    assert [s.queued for s in outcome.served] == pytest.approx([0.5, 0.2 + 10 * 0.5 / 100])


def test_elastic_kv_cache_displaces_reusable_weights() -> None:
    profile = replace(PLAIN, uses=frozenset({"reuse"}))
    runtime = Runtime(in_dram=True, elastic_kv=True)
    service = Batching(prefill_tokens_per_second=1e6, tpot_ms=1, concurrency=4)
    models = [model("a", keep_alive=1), model("b", weights_gb=9, service=service, kv_mb_per_token=10, keep_alive=1)]
    requests = [ask(0, "a"), ask(10, "b", 100, 200), ask(20, "a")]
    outcome = simulate(cluster(runtime), models, requests, profile)
    assert outcome.served[2].queued == pytest.approx(2 / 20)  # 3 GB of cache pushed out 2 of its 10 GB
    assert outcome.lost == 0


@pytest.mark.parametrize("leave_s", [0.0, 0.25])
def test_waiting_model_is_placed_when_an_instance_has_left_after_its_keep_alive(leave_s: float) -> None:
    profile = replace(PLAIN, clear=evict_none)
    runtime = Runtime(in_dram=True, startup=Startup(leave_s=leave_s))
    models = [model("a", weights_gb=15, keep_alive=5), model("b", weights_gb=15)]
    outcome = simulate(cluster(runtime), models, [ask(0, "a"), ask(2, "b")], profile)
    # The first one is loaded in 0.75 s, serves 1 s, and stays 5 s.
    assert [s.queued for s in outcome.served] == pytest.approx([0.75, 0.75 + 1 + 5 + leave_s - 2 + 0.75])


def test_request_without_memory_for_its_kv_cache_is_served_when_another_has_ended() -> None:
    runtime = Runtime(in_dram=True, elastic_kv=True)
    models = [model(name, weights_gb=9, service=LONG, kv_mb_per_token=10) for name in "ab"]
    outcome = simulate(cluster(runtime), models, [ask(0, "b", 100, 1), ask(10, "a", 100, 100), ask(12, "b", 100, 1)], PLAIN)
    _, longer, waiting = sorted(outcome.served, key=lambda s: s.number)
    # 18 GB of weights leave room for its cache of 2 GB.
    assert longer.ended == pytest.approx(10.45 + 0.1 + 99 * 0.1)
    assert waiting.queued == pytest.approx(longer.ended - 12)


def test_one_idle_instance_leaves_for_the_kv_caches_of_requests_that_wait_for_it() -> None:
    runtime = Runtime(in_dram=True, elastic_kv=True, startup=Startup(leave_s=0.25))
    models = [*(model(name, weights_gb=5) for name in "ac"), model("b", weights_gb=8, service=LONG2, kv_mb_per_token=10)]
    requests = [ask(0, "a"), ask(5, "c"), ask(10, "b", 100, 1), ask(50, "b", 100, 200), ask(50.1, "b", 100, 200)]
    outcome = simulate(cluster(runtime), models, requests, PLAIN)
    # Of 20 GB, 2 are free, a cache needs 3, and the least recently used instance leaves 5.
    assert [s.queued for s in sorted(outcome.served, key=lambda s: s.number)[3:]] == pytest.approx([0.25, 0.15])
    assert outcome.stops == 1


def test_weights_are_copied_from_a_peer_that_executes_the_model() -> None:
    profile = replace(PLAIN, keep=keep_until_needed, uses=frozenset({"peer_copy"}))
    links = LinkSpeeds(remote=1, ssd=1, device=10, bus=10, peer=40)
    runtime = Runtime(in_dram=True, exclusive=True)
    outcome = simulate(cluster(runtime, links=links, devices=2), [model("a")], [ask(0, "a"), ask(1.5, "a"), ask(1.6, "a")], profile)
    # From the host in 1 s while it executes; there already; copied in 0.25 s while it executes.
    assert [s.ttft for s in outcome.served] == pytest.approx([1.0, 1.0, 1.0])
    assert loads(outcome) == {"dram": 1, "ready": 1, "peer": 1}


def test_neighbouring_devices_share_their_bus() -> None:
    links = LinkSpeeds(remote=1, ssd=1, device=10, bus=10)
    runtime = Runtime(in_dram=True, exclusive=True)
    profile = replace(PLAIN, keep=keep_until_needed)
    slow = simulate(cluster(runtime, links=links, devices=2), [model("a"), model("b")], [ask(0, "a"), ask(0, "b")], profile)
    assert [s.ttft for s in slow.served] == pytest.approx([2.0, 2.0])


def test_resumable_requests_are_preempted_or_migrated_with_a_pause() -> None:
    node = {"devices": 1, "device_gb": 12, "dram_gb": 100, "ssd_gb": 0}
    slow = NodeGroup.model_validate({"name": "slow", **node, "kind": "slow", "links": LinkSpeeds(remote=1, ssd=1, device=20)})
    other = NodeGroup.model_validate({"name": "other", **node, "kind": "other", "links": LinkSpeeds(remote=5, ssd=1, device=20)})
    machines = ClusterFile(nodes=(slow, other))
    models = [model("free", service=LONG), model("bound", kinds=["other"])]
    outcome = simulate(machines, models, [ask(0, "free", 100, 201), ask(10, "bound", 1, 1)], shepherd.PROFILE)
    assert outcome.preemptions == 1
    first = next(s for s in outcome.served if s.model == "free")
    # It began at 2 s. At 10 s it is preempted, loads for 10 s on the slow node, and has caught up
    # 8 s later.
    assert first.pause == pytest.approx(10 + 8)
    assert first.ended == pytest.approx(20 + 0.1 + 20)
    moved = simulate(machines, models, [ask(0, "free", 100, 201), ask(10, "bound", 1, 1)], serverlessllm.PROFILE)
    assert (moved.migrations, moved.preemptions) == (1, 0)
    pause = next(s for s in moved.served if s.model == "free").pause
    assert 0 < pause < 0.2  # the tokens left to compute in the last round
    assert next(s for s in moved.served if s.model == "bound").queued > 10  # it waits until the other one has migrated


def test_suspended_instance_is_resumed_from_its_snapshot() -> None:
    models = [model("a", snapshot_gb=4), model("b", weights_gb=15)]
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1))
    outcome = simulate(cluster(runtime), models, [ask(0, "a"), ask(10, "b"), ask(20, "a")], swapservellm.PROFILE)
    # Containers take 3 s, in which a's 4 GB make room for b. b's 15 GB at 20 GB/s make room for a,
    # which resumes in 0.2 s.
    assert [s.queued for s in outcome.served] == pytest.approx([3.5, 3.75, 0.75 + 0.2 + 0.1])
    assert outcome.suspensions == 2
    assert loads(outcome) == {"dram": 2, "snapshot": 1}


@pytest.mark.parametrize(("snapshot_gb", "dram_gb", "expected"), [(10, 100, 2), (10, 25, 2), (12, 25, 1)])
def test_evicted_instance_is_suspended_where_its_snapshot_displaces_no_other_weights(
    snapshot_gb: int, dram_gb: int, expected: int
) -> None:
    models = [model("a", snapshot_gb=snapshot_gb), model("b", weights_gb=15)]
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1))
    profile = replace(PLAIN, uses=frozenset({"suspend"}))
    asks = [ask(0, "a"), ask(10, "b"), ask(20, "a")]
    outcome = simulate(cluster(runtime, dram_gb=dram_gb), models, asks, profile)
    assert outcome.suspensions == expected
    assert loads(outcome) == ({"dram": 2, "snapshot": 1} if expected == 2 else {"dram": 3})
    # 15 GB of b leave at 20 GB/s and 10 GB of a return; or b leaves beside a's new container.
    assert outcome.served[-1].queued == pytest.approx(0.75 + 0.1 + 0.5 if expected == 2 else 3 + 0.5)


def test_later_start_takes_no_memory_that_an_older_one_waits_for() -> None:
    """v and w leave for a at 12 s, one after the other, and x leaves for b at 13 s."""
    models = [model(name, weights_gb=gb) for name, gb in (("v", 8), ("w", 4), ("x", 8), ("a", 12), ("b", 8))]
    asks = [ask(at, name) for at, name in ((0, "v"), (2, "w"), (5, "x"), (10, "a"), (11, "b"))]
    outcome = simulate(cluster(Runtime(in_dram=True, startup=Startup(leave_s=2))), models, asks, PLAIN)
    queued = {s.model: s.queued for s in outcome.served}
    assert (queued["a"], queued["b"]) == pytest.approx((2 + 12 / 20, 2 + 8 / 20))


def test_instance_on_an_exclusive_device_is_stopped_because_no_snapshot_is_restored_there() -> None:
    models = [model("a"), model("b", weights_gb=15)]
    runtime = Runtime(in_dram=True, exclusive=True, startup=Startup(container_s=3, restore_s=0.1))
    profile = replace(PLAIN, keep=keep_until_needed, uses=frozenset({"suspend"}))
    outcome = simulate(cluster(runtime, dram_gb=25), models, [ask(0, "a"), ask(10, "b"), ask(20, "a")], profile)
    assert outcome.suspensions == 0
    assert loads(outcome) == {"dram": 3}


def held_in_memory(machines: ClusterFile, models: list[ModelGroup], asks: list[Request], profile: Profile) -> set[str]:
    """Return what the first node has in its memory at the end."""
    world = World(machines, models, profile, 0)
    Controller(world).run(asks)
    return set(world.nodes["node-0"].dram.held)


def test_weights_that_a_snapshot_displaced_stay_in_memory_when_it_is_restored() -> None:
    models = [model("a"), model("b", weights_gb=15)]
    machines = cluster(Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1)), dram_gb=25)
    profile = replace(PLAIN, uses=frozenset({"suspend"}))
    held = held_in_memory(machines, models, [ask(0, "a"), ask(10, "b"), ask(20, "a")], profile)
    assert held == {"a", "snapshot:b"}


def test_weights_stay_in_memory_if_an_instance_is_stopped_because_there_is_a_snapshot() -> None:
    models = [model("a", replicas_max=2, keep_alive=1), model("b", weights_gb=1)]
    machines = cluster(Runtime(in_dram=True, startup=Startup(container_s=3)), devices=2, dram_gb=21)
    profile = replace(PLAIN, scale=per_request, uses=frozenset({"suspend"}))
    held = held_in_memory(machines, models, [ask(0, "a"), ask(0, "a"), ask(20, "b")], profile)
    assert held == {"a", "b", "snapshot:a"}


def test_snapshot_does_not_displace_weights_that_are_loaded_to_another_device() -> None:
    """The second instance of a is planned at 8.5 s, and loads until 16.5 s; b needs room at 12 s.

    The weights of both fill the host memory: a snapshot of a needs the room of its weights.
    """
    models = [model("a", replicas_max=2), model("b", weights_gb=15)]
    links = LinkSpeeds(remote=1, ssd=5, device=2)
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3, restore_s=0.1))
    machines = cluster(runtime, links=links, devices=2, dram_gb=25)
    profile = replace(PLAIN, scale=per_request, uses=frozenset({"suspend"}))
    asks = [ask(0, "a"), ask(8.5, "a"), ask(12, "b")]
    assert held_in_memory(machines, models, asks, profile) == {"a", "b"}
    assert simulate(machines, models, asks, profile).suspensions == 0


@pytest.mark.parametrize("given_up_at", [1.0, 5.0])
def test_start_that_is_given_up_unpins_its_weights_and_no_others(given_up_at: float) -> None:
    """It copies from 3 s to 8 s. A second after its end another start pins the same weights."""
    runtime = Runtime(in_dram=True, startup=Startup(container_s=3))
    world = World(cluster(runtime, links=LinkSpeeds(remote=1, ssd=5, device=2), devices=2), [model("a")], PLAIN, 0)
    controller, memory = Controller(world), world.nodes["node-0"].dram

    def begin(device: str) -> None:
        option = controller.options.make_plain(world.models["a"], world.devices[device], "dram")
        start = controller.starts.create(world.models["a"], option, device, controller.on_finished, lambda _: None)
        controller.starts.begin(start)

    begin("node-0/0")
    pinned = list[bool]()
    world.clock.at(given_up_at, lambda: controller.starts.give_up(controller.starts.under_way["node-0/0"]))
    world.clock.at(given_up_at + 1.0, lambda: begin("node-0/1"))
    for after in (0.5, 2.5, 20.0):
        world.clock.at(given_up_at + after, lambda: pinned.append(not memory.evictable_bytes("a")))
    world.clock.run()
    assert pinned == [False, True, False]


def test_as_many_idle_instances_as_replicas_min_outlast_their_keep_alive() -> None:
    profile = replace(PLAIN, scale=per_request)
    models = [model("a", replicas_min=1, replicas_max=2, keep_alive=1)]
    outcome = simulate(cluster(devices=2), models, [ask(0, "a"), ask(0, "a"), ask(20, "a")], profile)
    assert outcome.stops == 1
    assert outcome.served[-1].queued == 0


def pipeline(tpot_ms: float = 100, kv: float = 0.0, gather: float = 1.0, **more: object) -> ModelGroup:
    service = Batching(prefill_tokens_per_second=1e6, tpot_ms=tpot_ms, concurrency=4)
    return model("p", service=service, kv_mb_per_token=kv, slo_ttft=60, slo_tpot=1, **more)


def spread_out(**runtime: object) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=1, device=100)
    node = NodeGroup(count=4, devices=1, device_gb=20, dram_gb=0, links=links)
    return ClusterFile(nodes=(node,), runtime=Runtime.model_validate({"cache_dram": False, "cache_ssd": False, **runtime}))


def test_pipeline_fetches_a_quarter_per_server_and_continues_on_one() -> None:
    profile = replace(PLAIN, choose=pipelined, uses=frozenset({"pipeline"}))
    outcome = simulate(spread_out(), [pipeline()], [ask(0, "p", 100, 201)], profile)
    (served,) = outcome.served
    assert served.queued == pytest.approx(2.5)  # 10 GB over four links of 1 GB/s
    assert loads(outcome) == {"pipeline": 1}
    assert outcome.device_seconds == pytest.approx(4 * 10.0 + (served.ended - 10.0), rel=0.02)  # the rest arrives after 7.5 s more


def test_consolidated_pipeline_that_is_used_again_has_one_keep_alive() -> None:
    """It is idle from 2.6 s on, and whole at 10 s: its keep-alive, up to 22.6 s, continues.

    A request ends that at 21 s, and the next keep-alive ends after 41 s.
    """
    profile = replace(PLAIN, choose=pipelined, uses=frozenset({"pipeline"}))
    outcome = simulate(spread_out(), [pipeline(keep_alive=20)], [ask(at, "p", 100, 2) for at in (0, 21, 30)], profile)
    assert (outcome.stages, outcome.successors, outcome.stops) == ([4], [1], 0)
    assert [s.queued for s in outcome.served[1:]] == [0, 0]


def test_consolidation_of_an_idle_pipeline_does_not_prolong_its_keep_alive() -> None:
    """Idle since 2.6 s, it leaves at 22.6 s; a request after that waits for another start."""
    profile = replace(PLAIN, choose=pipelined, uses=frozenset({"pipeline"}))
    outcome = simulate(spread_out(), [pipeline(keep_alive=20)], [ask(at, "p", 100, 2) for at in (0, 25)], profile)
    assert (outcome.stages, outcome.successors, outcome.stops) == ([4, 4], [1], 1)


def test_largest_stage_delays_its_pipeline() -> None:
    profile = replace(PLAIN, choose=pipelined, uses=frozenset({"pipeline"}))
    models = pipeline(), pipeline(largest_stage={4: 0.4})
    even, uneven = (simulate(spread_out(), [m], [ask(0, "p", 100, 2)], profile).served[0].ttft for m in models)
    fetched, first = 10.0, even - 10.0 / 4
    assert uneven == pytest.approx(0.4 * fetched + first)


def test_a_pipeline_becomes_as_many_instances_as_are_wanted() -> None:
    profile = replace(PLAIN, choose=pipelined, scale=per_request, uses=frozenset({"pipeline"}))
    requests = [ask(0, "p", 100, 401) for _ in range(16)]
    outcome = simulate(spread_out(), [pipeline(replicas_max=4)], requests, profile)
    assert len(outcome.served) == 16
    assert outcome.loads["pipeline"] == 1
    begun = sorted(s.queued for s in outcome.served)
    assert begun[:4] == pytest.approx([2.5] * 4)
    assert begun[-1] == pytest.approx(10.0)  # every stage has the rest, 7.5 GB, by then
    assert outcome.lost == 0


@pytest.mark.parametrize("failover", ["resume", "restart"])
def test_requests_of_a_failed_node_are_resumed_or_restarted(failover: str) -> None:
    node = NodeGroup(count=2, devices=1, device_gb=20, dram_gb=100, links=LinkSpeeds(remote=1, ssd=1, device=20))
    failures = Failures(events=(Failure(node="node-0", at=6, seconds=100),))
    runtime = Runtime.model_validate({"in_dram": True, "failover": failover})
    machines = ClusterFile(nodes=(node,), runtime=runtime, failures=failures)
    outcome = simulate(machines, [model("a", service=LONG)], [ask(0, "a", 100, 101)], PLAIN)
    (served,) = outcome.served
    assert outcome.restarts == 1
    # It began at 0.5 s. At 6 s the other node loads for 0.5 s; the prompt takes 0.1 s again, and
    # with it the earlier tokens.
    tokens = int((6 - 0.6) / 0.1) + 1
    ends = {"resume": 6.5 + (100 + tokens) / 1000 + (101 - tokens) * 0.1, "restart": 6.5 + 0.1 + 10.0}
    assert served.ended == pytest.approx(ends[failover], abs=0.02)
    assert served.pause > 0.5


def test_start_on_a_node_that_fails_counts_as_device_time_until_then() -> None:
    """It ends after 0.25 s. The next one loads from 1 s to 11 s, and serves for 1 s."""
    failures = Failures(events=(Failure(node="node-0", at=0.25, seconds=0.75),))
    outcome = simulate(cluster(failures=failures), [model("a")], [ask(0, "a")], PLAIN)
    assert outcome.ended_at == pytest.approx(12)
    assert outcome.device_seconds == pytest.approx(0.25 + 11)
    assert outcome.device_memory_gb_seconds == pytest.approx(10 * (0.25 + 11))


def test_request_that_a_failed_node_interrupted_waits_no_longer_than_the_time_out() -> None:
    failures = Failures(events=(Failure(node="node-0", at=2, seconds=1000),))
    runtime = Runtime(in_dram=True, timeout_s=50)
    outcome = simulate(cluster(runtime, failures=failures), [model("a", service=LONG)], [ask(0, "a")], PLAIN)
    assert (outcome.timed_out, outcome.lost, outcome.restarts, outcome.ended_at) == (1, 0, 1, 52.0)


def test_request_whose_start_a_failure_ended_waits_no_longer_than_the_time_out() -> None:
    """It was bound to the device when it arrived."""
    failures = Failures(events=(Failure(node="node-0", at=0.25, seconds=1000),))
    runtime = Runtime(in_dram=True, exclusive=True, timeout_s=50)
    outcome = simulate(cluster(runtime, failures=failures), [model("a")], [ask(0, "a")], PLAIN)
    assert (outcome.timed_out, outcome.lost, outcome.ended_at) == (1, 0, 50.25)


@pytest.mark.parametrize(("failover", "pauses"), [("resume", [1.546, 2.567]), ("restart", [6.0, 4.5])])
def test_pause_contains_the_prompts_that_are_computed_before(failover: str, pauses: list[float]) -> None:
    """First tokens at 1.5 s and 4 s; the node fails at 6 s, and the other one has loaded at 6.5 s.

    Resumed, the 1,046 tokens of the first request are computed before the 1,021 of the second.
    Restarted, the prompts of 1,000 tokens are: the first tokens are there again at 7.5 s and 8.5 s.
    """
    node = NodeGroup(count=2, devices=1, device_gb=20, dram_gb=100, links=LinkSpeeds(remote=1, ssd=1, device=20))
    failures = Failures(events=(Failure(node="node-0", at=6, seconds=100),))
    runtime = Runtime.model_validate({"in_dram": True, "failover": failover})
    service = LONG.model_copy(update={"concurrency": 2})
    machines = ClusterFile(nodes=(node,), runtime=runtime, failures=failures)
    outcome = simulate(machines, [model("a", service=service)], [ask(0, "a", 1000), ask(3, "a", 1000)], PLAIN)
    served = sorted(outcome.served, key=lambda s: s.at)
    assert [s.pause for s in served] == pytest.approx(pauses)
    assert [s.ended - s.at - s.ttft - 10 for s in served] == pytest.approx(pauses)


def test_prompt_of_a_resumed_request_is_computed_in_turns_with_a_busy_neighbour() -> None:
    """It has 55 of its tokens at 6 s. With its prompt these are 155, at half of 1,000 a second."""
    node = {"devices": 1, "device_gb": 20, "dram_gb": 100, "links": LinkSpeeds(remote=1, ssd=1, device=20)}
    first, second = (NodeGroup.model_validate({"name": n, "kind": n, **node}) for n in ("first", "second"))
    failures = Failures(events=(Failure(node="first-0", at=6, seconds=100),))
    machines = ClusterFile(nodes=(first, second), runtime=Runtime(in_dram=True), failures=failures)
    models = [model("a", service=LONG), model("b", service=LONG, kinds=["second"])]
    outcome = simulate(machines, models, [ask(0, "a"), ask(0, "b", 100, 601)], PLAIN)
    assert next(s for s in outcome.served if s.model == "a").pause == pytest.approx(0.5 + 0.155 * 2)


def test_request_over_its_waiting_limit_times_out() -> None:
    runtime = Runtime(in_dram=True, timeout_s=5)
    outcome = simulate(cluster(runtime), [model("a", service=Fixed(seconds=9))], [ask(0, "a"), ask(0, "a"), ask(8, "a")], PLAIN)
    assert (len(outcome.served), outcome.timed_out) == (2, 1)
    assert outcome.figures()["slo_attainment"] == pytest.approx(1 / 3, abs=1e-3)  # the last one took 10.5 s


def test_requests_of_a_source_that_fails_while_their_destination_loads_are_served_there() -> None:
    node = {"devices": 1, "device_gb": 12, "dram_gb": 100, "ssd_gb": 0}
    slow = NodeGroup.model_validate({"name": "slow", **node, "kind": "slow", "links": LinkSpeeds(remote=1, ssd=1, device=20)})
    other = NodeGroup.model_validate({"name": "other", **node, "kind": "other", "links": LinkSpeeds(remote=5, ssd=1, device=20)})
    failures = Failures(events=(Failure(node="other-0", at=15, seconds=1),))
    models = [model("free", service=LONG), model("bound", kinds=["other"])]
    machines = ClusterFile(nodes=(slow, other), failures=failures)
    outcome = simulate(machines, models, [ask(0, "free", 100, 201), ask(10, "bound", 1, 1)], serverlessllm.PROFILE)
    assert (outcome.lost, outcome.restarts) == (0, 1)
    # The destination has been loading since 10 s, for 10 s; the tokens of 13 s are computed again.
    assert next(s for s in outcome.served if s.model == "free").pause == pytest.approx(5 + 0.23, abs=0.02)


def test_pipeline_is_consolidated_on_a_node_that_failed_during_a_consolidation() -> None:
    profile = replace(PLAIN, choose=pipelined, uses=frozenset({"pipeline"}))
    failures = Failures(events=(Failure(node="node-0", at=5, seconds=1),))
    machines = spread_out().model_copy(update={"failures": failures})
    outcome = simulate(machines, [pipeline(keep_alive=1)], [ask(0, "p", 100, 201), ask(100, "p", 100, 201)], profile)
    assert outcome.stages == [4, 3, 4]
    assert outcome.successors == [1, 1]
