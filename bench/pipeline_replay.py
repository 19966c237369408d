"""Simulate the starts that `bench.pipeline` measures, with nodes and links as there.

All durations are measured with one worker, and the sizes of stages are as planned. What the
simulator predicts of a group it has from nothing that was measured with groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.scheduler.domain.policies.port import Ask, Option
from simulator.config import GB, Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.policies import hydraserve
from simulator.simulate import simulate
from simulator.workloads.request import Request

_FAST = 100.0
"""GB/s: a cpu device uses the bytes where the loader put them."""
_HOP_S = 1e-3
"""The live scheduler's assumption for a hop between stages."""


@dataclass(frozen=True, slots=True)
class OneWorker:
    """Measurements with one worker.

    Attributes:
        weights: Bytes of the model.
        fetch_s: Seconds to fetch them.
        ttft_s: First token of a cold start.
        tpot_s: Seconds for each further token.
        largest_stage: Share of the weights in the largest stage, by number of stages.
    """

    weights: int
    fetch_s: float
    ttft_s: float
    tpot_s: float
    largest_stage: dict[int, float]


def simulate_ttft_s(stages: int, measured: OneWorker, prompt_tokens: int, output_tokens: int) -> float:
    """Return the simulated TTFT of a cold start with so many stages, each on a node of its own."""

    def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
        found = [o for o in options if o.stages == stages]
        return min(found, key=lambda o: (o.full_workers, o.cost.total_s, o.key), default=None)

    whole = measured.weights / GB
    links = LinkSpeeds(remote=whole / measured.fetch_s, ssd=_FAST, device=_FAST)
    startup = Startup(warm_up_s=max(0.0, measured.ttft_s - measured.fetch_s))
    cluster = ClusterFile(
        nodes=(NodeGroup(count=stages, devices=1, device_gb=4 * whole, dram_gb=4 * whole, links=links),),
        runtime=Runtime(startup=startup, hop_s=_HOP_S, capabilities=frozenset({"pipeline"})),
    )
    service = Batching(prefill_tokens_per_second=1e6, tpot_ms=measured.tpot_s * 1e3)
    model = ModelGroup(name="m", weights_gb=whole, largest_stage=measured.largest_stage, service=service, slo_ttft=600)
    profile = replace(hydraserve.PROFILE, choose=choose)
    outcome = simulate(cluster, (model,), (Request(0.0, "m", prompt_tokens, output_tokens),), profile)
    [served] = outcome.served
    return served.ttft
