"""HydraServe Fig. 14: a burst of requests on 16 V100, by workers per cold start.

All requests arrive at once. The autoscaler counts the workers that they need and starts pipelines:
of Fig. 14's fixed size, or of the size that the autoscaler and Algorithm 1 choose. Each pipeline
becomes as many whole instances as the load needs, and each of them takes its share of the requests.
"""

from __future__ import annotations

from statistics import fmean

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Case, Figures, Options, Result, label, vary_profile
from services.scheduler.domain.policies.port import Profile
from simulator.config import ClusterFile
from simulator.report import Outcome
from simulator.workloads.request import Request

NAME = "hydraserve-fig14"
LOADS = (32, 64, 128)
GROUPS = (1, 2, 4)
CHOSEN = "chosen"
HOPS_S = (0.008, 0.02, 0.03, 0.04)
"""Seconds that a stage adds to each token: more than the artifact's constant, as in Fig. 12."""
TOKENS = 512
"""Section 8.4: input and output."""
MODEL = "Llama2-13B"
STATED = "stated"
FIG7 = "as in Fig. 7"
WHOLE_GB_S = c.weights_gb(MODEL) / c.FIG7["v100"][MODEL][c.SYSTEMS.index("HydraServe, one worker")]
"""Least rate at which Fig. 7's single worker fetched the whole model: within its cold start."""


def machines(slower: float = 1.0, fetch_gb_s: float | None = None, hop_s: float | None = None) -> ClusterFile:
    cluster = h.first_test_bed("v100", "hydraserve", slower)
    (node,) = cluster.nodes
    links = node.links.model_copy(update={"remote": fetch_gb_s or node.links.remote})
    runtime = cluster.runtime.model_copy(update={"hop_s": cluster.runtime.hop_s if hop_s is None else hop_s})
    return cluster.model_copy(update={"nodes": (node.model_copy(update={"links": links}),), "runtime": runtime})


def profile_of(group: int | None) -> Profile:
    """Return HydraServe with pipelines of a fixed size; None: of the size that it chooses."""
    return h.HYDRA if group is None else vary_profile(h.HYDRA, "hydraserve", choose=h.choose_stages(group))


def case(requests: int, group: int | None, cluster: ClusterFile, **shown: str) -> Case:
    burst = [Request(1.0, MODEL, TOKENS, TOKENS)] * requests
    model = h.group(MODEL, MODEL, "chatbot", 1, kv_per_token_mb=h.KV_MB_13B)
    size = CHOSEN if group is None else str(group)
    return Case(label(requests=str(requests), group=size, **shown), cluster, (model,), lambda seed: burst, profile_of(group))


def measure(outcome: Outcome) -> Figures:
    return {
        "mean_ttft_s": fmean(s.ttft for s in outcome.served),
        "tpot_ms": 1e3 * fmean(s.tpot for s in outcome.served),
        "all_tokens_s": max(s.ended - s.at for s in outcome.served),
        "starts": float(len(outcome.stages)),
        "workers": float(sum(outcome.stages)),
        "instances": float(outcome.stages.count(1) + sum(outcome.successors)),
        "unserved": float(len(outcome.given_up) + outcome.lost),
    }


def run(options: Options) -> Result:
    result = Result(NAME, "a burst on 16 V100: mean TTFT and TPOT by workers in a group")
    once = Options(seeds=1)
    result.measure_cases((case(n, g, machines(), links=STATED) for n in LOADS for g in (*GROUPS, None)), once, measure)
    slow = machines(fetch_gb_s=WHOLE_GB_S)
    result.measure_cases((case(n, g, slow, links=FIG7) for n in LOADS for g in (*GROUPS, None)), once, measure)
    one, four = (result.row(requests="128", group=str(g), links=STATED) for g in (1, 4))
    result.ratio(
        "8.4, Fig. 14a", "128 requests: mean TTFT of single workers over groups of four", one.divide_by(four, "mean_ttft_s"), 1.87
    )
    for group in GROUPS[1:]:
        slower = result.row(requests="128", group=str(group), links=STATED).divide_by(one, "tpot_ms")
        result.claim_within("8.4, Fig. 14b", f"TPOT of groups of {group} over single workers'", slower, 1.08, 1.19)
    one, four = (result.row(requests="128", group=str(g), links=FIG7) for g in (1, 4))
    result.notes += [
        "Nothing is drawn: one run. Constants are those of the other experiments of HydraServe. "
        f"{FIG7!r}: fetches have {WHOLE_GB_S:.2f} GB/s instead of {c.NETWORK.value:g}, the least rate with which one worker fetches this "
        "model within the 17.4 s that Fig. 7 has for its first token.",
        f"128 requests with fetches {FIG7}: {one.divide_by(four, 'mean_ttft_s')} times; the paper has 1.87.",
        f"{CHOSEN!r}: the autoscaler asks for pipelines no smaller than the missing workers, four at most, and Algorithm 1 takes them.",
        *(_explain_hops(hop_s) for hop_s in HOPS_S),
    ]
    if options.sensitivity:
        for factor in (0.5, 1.5):
            part = Result("", "")
            part.measure_cases((case(128, g, machines(factor)) for g in (1, 4)), once, measure)
            gain = part.row(group="1").divide_by(part.row(group="4"), "mean_ttft_s")
            result.notes.append(f"Sensitivity, times beside the bytes x {factor}: {gain} times.")
    return result


def _explain_hops(hop_s: float) -> str:
    """Return the figures of 128 requests with another time for each stage of a token."""
    part = Result("", "")
    part.measure_cases((case(128, g, machines(hop_s=hop_s)) for g in GROUPS), Options(seeds=1), measure)
    slower = (f"{part.row(group=str(g)).divide_by(part.row(group='1'), 'tpot_ms')}" for g in GROUPS[1:])
    return (
        f"With {1e3 * hop_s:g} ms for each stage of a token instead of 1: TPOT {' and '.join(slower)} times, groups of 2 and of 4."
    )
