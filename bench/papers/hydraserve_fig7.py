"""HydraServe Fig. 7: time to the first token of one cold start.

The figures are by model, device and system.
"""

from __future__ import annotations

from statistics import fmean

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import CLOSE, Case, Options, Result, estimate, label, vary_profile
from services.scheduler.domain.policies.port import Profile
from simulator.report import Outcome
from simulator.workloads.request import Request

NAME = "hydraserve-fig7"
PROFILES: dict[str, Profile] = {
    "serverless vLLM": h.VLLM,
    "ServerlessLLM": h.SLLM,
    "ServerlessLLM, cached": vary_profile(h.SLLM, "serverlessllm-cached"),
    "HydraServe, one worker": vary_profile(h.HYDRA, "hydraserve", choose=h.choose_stages(1)),
    "HydraServe": vary_profile(h.HYDRA, "hydraserve", choose=h.choose_stages(4)),
}
PROMPT = 128
"""Tokens; not stated, and of little weight: 24 ms to 37 ms."""


def case(kind: str, model: str, system: str, slower: float = 1.0) -> Case:
    profile = PROFILES[system]
    cached = system == "ServerlessLLM, cached"
    machines = h.first_test_bed(kind, profile.name, slower, cached)
    if cached:
        machines = machines.model_copy(update={"runtime": machines.runtime.model_copy(update={"in_dram": True})})
    models = (h.group(model, model, "summarization", 1).model_copy(update={"kinds": frozenset()}),)
    return Case(
        label(device=kind, model=model, system=system), machines, models, lambda seed: [Request(1.0, model, PROMPT, 8)], profile
    )


def measure(outcome: Outcome) -> dict[str, float]:
    return {"ttft_s": outcome.served[0].ttft} if outcome.served else {}


def run(options: Options) -> Result:
    result = Result(NAME, "one cold start (seconds to the first token)")
    cases = [case(k, m, s) for k, models in c.FIG7.items() for m in models for s in c.SYSTEMS]
    result.measure_cases(cases, Options(seeds=1), measure)
    errors = []
    for row in result.rows:
        kind, model, system = row.label["device"], row.label["model"], row.label["system"]
        row.paper["ttft_s"] = c.FIG7[kind][model][c.SYSTEMS.index(system)]
        if model != c.CALIBRATION:
            errors.append(abs(row["ttft_s"].mean / row.paper["ttft_s"] - 1))
    close = sum(e <= CLOSE for e in errors)
    result.notes.append(
        f"Of the {len(errors)} values of the artifact's Fig. 7, {close} are within {CLOSE:.0%}; "
        f"the mean difference is {fmean(errors):.0%}, the largest {max(errors):.0%}."
    )
    gains(result, "serverless vLLM")
    gains(result, "ServerlessLLM")
    for kind in c.FIG7:
        single, cached = (
            result.row(device=kind, model="OPT-6.7B", system=s) for s in ("HydraServe, one worker", "ServerlessLLM, cached")
        )
        less = single.divide_by(cached, "ttft_s")
        result.claim_below("8.2", f"OPT-6.7B on {kind}: one worker quicker than ServerlessLLM with the model cached (ratio)", less)
    result.notes.append(
        f"The times beside the bytes come from the {c.CALIBRATION} rows (not compared otherwise); nothing is drawn: one run."
    )
    if options.sensitivity:
        for factor in (0.5, 1.5):
            part = Result("", "")
            part.measure_cases([case("a10", "Llama2-7B", s, factor) for s in c.SYSTEMS], Options(seeds=1), measure)
            seconds = ", ".join(f"{r.label['system']} {r['ttft_s']}" for r in part.rows)
            result.notes.append(f"Sensitivity, times beside the bytes x {factor}, Llama2-7B on A10: {seconds}.")
    return result


def gains(result: Result, system: str) -> None:
    """Return the gains over all models but the one that the floors are taken from.

    Section 8.2's 2.1 and 1.7 are of that model.
    """
    ours, paper = [], []
    for kind, models in c.FIG7.items():
        for model, values in models.items():
            if model != c.CALIBRATION:
                slow, quick = (result.row(device=kind, model=model, system=s) for s in (system, "HydraServe"))
                ours.append(slow.divide_by(quick, "ttft_s").mean)
                paper.append(values[c.SYSTEMS.index(system)] / values[c.SYSTEMS.index("HydraServe")])
    for what, of in (("least", min), ("most", max)):
        result.ratio("8.2, artifact", f"{system} over HydraServe, the {what} of the models", estimate([of(ours)]), of(paper))
