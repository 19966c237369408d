"""HydraServe Fig. 12: tokens over time, with and without scaling down a pipeline.

A pipeline scales down to one worker.
"""

from __future__ import annotations

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Case, Options, Result, estimate, label, vary_profile
from simulator.report import Outcome
from simulator.workloads.request import Request

NAME = "hydraserve-fig12"
TOKENS = 512
"""Section 8.4: input and output."""
BATCHES = (1, 4, 8)
"""Plot only; up to the maximum batch size."""
STAGES = 4
HOPS_S = (c.HOP_S.value, 0.008, 0.02, 0.03, 0.04)
"""Seconds that a stage adds to each token: the artifact's constant, and what the gains require."""


def case(batch: int, consolidated: bool, hop_s: float = c.HOP_S.value) -> Case:
    model = h.group("Llama2-13B", "Llama2-13B", "chatbot", 1, kv_per_token_mb=h.KV_MB_13B)
    profile = vary_profile(h.HYDRA, "hydraserve", choose=h.choose_stages(STAGES))
    requests = [Request(1.0, "Llama2-13B", TOKENS, TOKENS)] * batch
    shown = label(batch=str(batch), scaling="down" if consolidated else "none", hop_ms=1e3 * hop_s)
    machines = h.first_test_bed("v100", "hydraserve")
    machines = machines.model_copy(update={"runtime": machines.runtime.model_copy(update={"hop_s": hop_s})})
    return Case(shown, machines, (model,), lambda seed: requests, profile, consolidated=consolidated)


def measure(outcome: Outcome) -> dict[str, float]:
    begin = min(s.at for s in outcome.served)
    return {
        "first_token_s": min(s.ttft for s in outcome.served),
        "all_tokens_s": max(s.ended for s in outcome.served) - begin,
        "tpot_ms": 1e3 * max(s.tpot for s in outcome.served),
    }


def run(options: Options) -> Result:
    result = Result(NAME, "Llama2-13B on V100, four stages: time to all tokens")
    result.measure_cases((case(b, s, hop) for hop in HOPS_S for b in BATCHES for s in (True, False)), Options(seeds=1), measure)
    gains = {hop: _gains(result, hop) for hop in HOPS_S}
    stated = gains[c.HOP_S.value]
    result.ratio("8.4, Fig. 12", "scaling down shortens generation, the least", estimate([min(stated)]), 1.90)
    result.ratio("8.4, Fig. 12", "scaling down shortens generation, the most", estimate([max(stated)]), 2.67)
    early = result.row(batch="1", scaling="down").divide_by(result.row(batch="1", scaling="none"), "first_token_s")
    result.claim_alike("8.4, Fig. 12", "the first token is as early (ratio)", early)
    result.notes.append(
        "Scaling down gains what a pipeline adds to a token, for the tokens after it. With "
        + "; ".join(f"{1e3 * hop:g} ms for each of the four stages: {min(g):.2f} to {max(g):.2f} times" for hop, g in gains.items())
        + "."
    )
    result.notes.append(
        "So the paper's pipeline adds 22 to 42 ms for each stage to a token of 58 ms, which is close to Eq. 2's worst case (each stage "
        "takes as long as the whole model). In its Fig. 14b, with the same model and stages, it adds 8 ms (hydraserve-fig14). Nothing shares "
        "these devices, and the artifact's cGPU policy (1, preemptive) gives a process that is alone all of a device. What slows the "
        "pipeline of Fig. 12 more than those of Fig. 14 the paper does not say."
    )
    return result


def _gains(result: Result, hop_s: float) -> list[float]:
    """Return the time to all tokens without scaling down over that with it, by batch."""
    shown = f"{1e3 * hop_s:g}"
    rows = ((result.row(batch=str(b), scaling=s, hop_ms=shown) for s in ("none", "down")) for b in BATCHES)
    return [none.divide_by(down, "all_tokens_s").mean for none, down in rows]
