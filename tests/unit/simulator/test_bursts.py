"""A burst is started in pipelines, which become as many whole instances as it needs: by hand.

Four nodes have a link of 1 GB/s each. The model has 10 GB; an engine runs four requests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.domain.policies.common import keep_setting
from simulator.config import Batching, ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.policies import hydraserve
from simulator.report import Outcome
from simulator.simulate import simulate
from simulator.workloads.request import Request

PROFILE = replace(hydraserve.PROFILE, keep=keep_setting)
PROMPT, OUTPUT = 100, 401
"""Tokens: 0.1 s to prefill, and 40 s to generate, at 0.1 s each."""
KV_GB = 0.001
"""Size of a token's keys and values."""


def machines(devices: int = 1, device_gb: float = 20, **runtime: object) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=1, device=1000)
    node = NodeGroup(count=4, devices=devices, device_gb=device_gb, dram_gb=0, links=links)
    settings = {"cache_dram": False, "cache_ssd": False, "stage_batches": True, **runtime}
    return ClusterFile(nodes=(node,), runtime=Runtime.model_validate(settings))


def model(*, prefill_together: bool = False, **more: object) -> ModelGroup:
    service = Batching(prefill_tokens_per_second=1000, prefill_together=prefill_together, tpot_ms=100, concurrency=4)
    settings = {"name": "m", "weights_gb": 10, "service": service, "slo_ttft": 9, "slo_tpot": 1, "replicas_max": 16, **more}
    return ModelGroup.model_validate(settings)


def burst(count: int, output: int = OUTPUT, prompt: int = PROMPT) -> list[Request]:
    return [Request(0.0, "m", prompt, output)] * count


def test_a_burst_is_one_decision_and_starts_a_pipeline_of_the_workers_that_it_needs() -> None:
    # 4 waiting and 4 expected: 2 workers; 8 and 8: 4. For one request, a worker alone (10 s) is too
    # late for 9 s, and four stages have no more memory than it.
    for count, stages in ((4, [2]), (8, [4]), (1, [4])):
        outcome = simulate(machines(), [model()], burst(count, output=2), PROFILE)
        assert outcome.stages == stages
        assert max(s.queued for s in outcome.served) == pytest.approx(10 / stages[0])


def test_without_room_for_the_workers_that_the_load_needs_there_are_fewer() -> None:
    """Three of four nodes have room for half a model: one stage becomes an instance."""
    large = NodeGroup(name="large", devices=1, device_gb=20, dram_gb=0, links=LinkSpeeds(remote=1, ssd=1, device=1000))
    small = large.model_copy(update={"name": "small", "count": 3, "device_gb": 6.0})
    cluster = machines().model_copy(update={"nodes": (large, small)})
    outcome = simulate(cluster, [model(replicas_max=4)], burst(8, output=101), PROFILE)
    assert (outcome.stages, outcome.successors) == ([4], [1])
    assert [s.queued for s in outcome.served] == pytest.approx([2.5] * 8)


def test_every_stage_becomes_an_instance_with_its_share_of_the_requests() -> None:
    """16 requests need 4 workers.

    The pipeline begins at 2.5 s, and each stage has the other 7.5 GB at 10 s. With four batches in
    flight it takes all 16, as many as its stages take alone afterwards.
    """
    outcome = simulate(machines(), [model()], burst(16), PROFILE)
    assert (outcome.stages, outcome.successors) == ([4], [4])
    assert [s.queued for s in outcome.served] == pytest.approx([2.5] * 16)
    # Prompts overlap: the first takes 0.1 s, and each further one 0.1/4 s more.
    assert sorted(s.ttft for s in outcome.served) == pytest.approx([2.6 + n * 0.025 for n in range(16)])
    assert [s.tpot for s in outcome.served] == pytest.approx([0.1] * 16, rel=0.01)


def test_a_pipeline_without_batches_for_each_stage_takes_the_requests_of_one_engine() -> None:
    outcome = simulate(machines(stage_batches=False), [model()], burst(16), PROFILE)
    begun = sorted(s.queued for s in outcome.served)
    assert begun == pytest.approx([2.5] * 4 + [10.0] * 12)
    assert max(s.ttft for s in outcome.served[:4]) == pytest.approx(2.5 + 4 * 0.1)


def test_successors_gather_their_own_requests_in_parallel() -> None:
    """At 10 s each successor gathers the KV cache of its four requests, each over its own link."""
    still = simulate(machines(), [model()], burst(16), PROFILE)
    moved = simulate(machines(gather_gb_per_second=1), [model(kv_mb_per_token=1e3 * KV_GB)], burst(16), PROFILE)
    tokens = [PROMPT + 1 + int((10.0 - s.at - s.ttft) / 0.1 + 1e-6) for s in moved.served]
    pause = max(sum(tokens[n : n + 4]) for n in range(0, 16, 4)) * KV_GB * 3 / 4
    assert 0.4 < pause < 0.6
    late = [
        m.ended - s.ended
        for m, s in zip(sorted(moved.served, key=lambda s: s.number), sorted(still.served, key=lambda s: s.number), strict=True)
    ]
    assert late == pytest.approx([pause] * 16, abs=0.02)
    assert [s.pause for s in moved.served] == pytest.approx([pause] * 16, abs=0.02)


def test_successors_whose_prompts_are_computed_together_continue_after_the_gathering() -> None:
    """The 16 prompts are computed from 2.5 s to 4.1 s, and each request has 60 tokens at 10 s."""
    together = model(prefill_together=True, kv_mb_per_token=1e3 * KV_GB)
    outcome = simulate(machines(gather_gb_per_second=1), [together], burst(16), PROFILE)
    assert (outcome.lost, outcome.successors) == (0, [4])
    assert [s.ttft for s in outcome.served] == pytest.approx([4.1] * 16)
    assert [s.pause for s in outcome.served] == pytest.approx([4 * (PROMPT + 60) * KV_GB * 3 / 4] * 16, abs=0.02)


def test_pipelines_of_the_same_nodes_gather_one_after_the_other() -> None:
    """The second of two pipelines serves on until the links of its nodes are free."""
    cluster = machines(devices=2, gather_gb_per_second=1)
    outcome = simulate(cluster, [model(kv_mb_per_token=1e3 * KV_GB)], burst(32), PROFILE)
    assert (outcome.stages, outcome.successors) == ([4, 4], [4, 4])
    pauses = sorted({round(s.pause, 3) for s in outcome.served})
    assert len(pauses) == 2
    first, second = pauses
    # During the first gathering the requests of the second pipeline get tokens, which move, too.
    assert second - first == pytest.approx(4 * int(first / 0.1) * KV_GB * 3 / 4, abs=2 * 4 * KV_GB)


def test_stages_of_one_node_share_a_fetch_which_the_ledger_counts_once() -> None:
    """64 requests need 16 workers, and Eq. 3 allows no second fetch of 2.5 GB in 4 s on a link.

    All four pipelines join the fetch of the first one, and later the fetch of the rest.
    """
    outcome = simulate(machines(devices=4), [model(slo_ttft=4)], burst(64), PROFILE)
    assert (outcome.stages, outcome.successors) == ([4] * 4, [4] * 4)
    assert [s.queued for s in outcome.served] == pytest.approx([2.5] * 64)
    assert max(s.tpot for s in outcome.served) == pytest.approx(0.1, rel=0.01)


def test_another_model_has_no_room_on_links_whose_fetches_would_miss_their_deadlines() -> None:
    cluster = machines(devices=2)
    models = [model(slo_ttft=4), model(name="n", slo_ttft=4)]
    requests = [*burst(8, output=2), *[Request(0.0, "n", PROMPT, 2)] * 8]
    outcome = simulate(cluster, models, requests, PROFILE)
    assert outcome.stages[0] == 4
    assert 4 not in outcome.stages[1:]


def test_pipeline_with_more_requests_than_its_successors_take_serves_on_until_they_fit() -> None:
    """8 requests run in two batches; there is room for one whole model, which takes 4."""
    large = NodeGroup(name="large", devices=1, device_gb=12, dram_gb=0, links=LinkSpeeds(remote=1, ssd=1, device=1000))
    small = large.model_copy(update={"name": "small", "device_gb": 6.0})
    cluster = machines().model_copy(update={"nodes": (large, small)})
    short, long = [Request(0.0, "m", PROMPT, 151)] * 4, [Request(0.0, "m", PROMPT, OUTPUT)] * 4
    outcome = simulate(cluster, [model(replicas_max=2)], [*short, *long], PROFILE)
    assert (outcome.stages, outcome.successors) == ([2], [1])
    # It begins at 5 s, and has the rest at 10 s. It splits when the short requests end, after 20 s.
    pair = 20.0 + 0.8
    assert outcome.device_seconds == pytest.approx(2 * pair + (outcome.ended_at - pair), rel=0.03)


def test_instances_with_fewer_requests_than_they_take_accept_new_ones() -> None:
    """16 requests need 4 instances when the pipeline begins; 8 are left at 10 s, when it ends."""
    late = [Request(12.0, "m", PROMPT, 11)] * 8
    outcome = simulate(machines(), [model()], [*burst(8, output=21), *burst(8, output=301), *late], PROFILE)
    assert (outcome.stages, outcome.successors) == ([4], [4])
    assert [s.queued for s in outcome.served if s.at == 12.0] == pytest.approx([0.0] * 8)


def test_request_that_waits_for_a_successor_of_a_serving_pipeline_is_not_cold() -> None:
    """The pipeline runs four requests from 2.5 s on; the others wait until it is split at 10 s."""
    late = [Request(4.0, "m", PROMPT, 11)] * 2
    outcome = simulate(machines(stage_batches=False), [model()], [*burst(8), *late], PROFILE)
    assert [s.queued for s in outcome.served if s.at == 4.0] == pytest.approx([6.0] * 2)
    assert {(s.at, s.cold) for s in outcome.served} == {(0.0, True), (4.0, False)}


def test_prompts_that_are_computed_together_pass_the_stages_once() -> None:
    """Two stages begin at 5 s; the four prompts take 0.4 s, and each stage's hop 0.05 s."""
    outcome = simulate(machines(hop_s=0.05), [model(prefill_together=True)], burst(4, output=2), PROFILE)
    assert outcome.stages == [2]
    assert [s.ttft for s in outcome.served] == pytest.approx([5 + 0.4 + 2 * 0.05] * 4)


@pytest.mark.parametrize("prefill_together", [False, True])
def test_prompts_of_the_remaining_stage_wait_for_the_gathering(prefill_together: bool) -> None:
    """A prompt of 1 s begins 0.1 s before the pipeline becomes one instance, at 10 s.

    Only the other three requests have a KV cache then.
    """
    late = Request(9.9, "m", 1000, 2)
    cluster = machines(stage_batches=False, gather_gb_per_second=1)
    group = model(prefill_together=prefill_together, kv_mb_per_token=1e3 * KV_GB, replicas_max=1)
    outcome = simulate(cluster, [group], [*burst(3), late], PROFILE)
    assert (outcome.stages, outcome.successors) == ([4], [1])
    found = next(s for s in outcome.served if s.at == 9.9)
    tokens = [PROMPT + 1 + int((10.0 - s.ttft) / 0.1 + 1e-6) for s in outcome.served if s is not found]
    assert found.pause == pytest.approx(sum(tokens) * KV_GB * 3 / 4, abs=0.003)
    assert found.ttft == pytest.approx(1.0 + found.pause)
    assert [s.pause for s in outcome.served] == pytest.approx([found.pause] * 4)


def test_pipeline_that_leaves_does_not_become_instances() -> None:
    """It leaves from 8.1 s to 10.6 s, after its keep-alive; the rest of it is there at 10 s."""
    cluster = machines(startup=Startup(leave_s=2.5))
    outcome = simulate(cluster, [model(keep_alive=5)], [*burst(16, output=2), Request(11.0, "m", PROMPT, 2)], PROFILE)
    assert (outcome.stages, outcome.successors) == ([4, 4], [])
    assert outcome.served[-1].queued == pytest.approx(2.5)


def test_start_of_a_pipeline_that_becomes_an_idle_instance_is_predicted_once() -> None:
    outcome = simulate(machines(), [model()], [*burst(1, output=2), Request(12.0, "m", PROMPT, 2)], PROFILE)
    assert (outcome.stages, outcome.successors) == ([4], [1])
    assert len(outcome.prediction_errors) == 1


def run_beside_others(keep_alive: float) -> Outcome:
    """A pipeline of two stages begins at 15 s beside instances that serve until 27 s.

    These are loaded from the disks. The nodes have no room for the whole model of the pipeline,
    whose request ends at once.
    """
    machine = NodeGroup(count=2, devices=1, device_gb=12.5, dram_gb=0, ssd_gb=7, links=LinkSpeeds(remote=1, ssd=1, device=1000))
    others = model(name="other", copies=2, weights_gb=7, service=Fixed(seconds=20), slo_ttft=30, keep_alive=keep_alive)
    asked = [Request(0.0, "other-0", 1, 1), Request(0.0, "other-1", 1, 1), *[Request(at, "m", PROMPT, 2) for at in (10.0, 60.5)]]
    outcome = simulate(machines().model_copy(update={"nodes": (machine,)}), [model(), others], asked, PROFILE)
    assert outcome.stages == [1, 1, 2]
    assert [s.queued for s in sorted(outcome.served, key=lambda s: s.at)] == pytest.approx([7.0, 7.0, 5.0, 0.0])
    return outcome


def test_pipeline_that_was_idle_when_it_had_no_room_becomes_one_instance_later() -> None:
    assert run_beside_others(keep_alive=1).successors == [1]


def test_no_idle_instance_leaves_for_the_rest_of_an_idle_pipeline() -> None:
    outcome = run_beside_others(keep_alive=100)
    assert (outcome.successors, outcome.stops) == ([], 0)
