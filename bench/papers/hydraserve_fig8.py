"""HydraServe Fig. 8: what each technique takes off a cold start."""

from __future__ import annotations

from itertools import pairwise

from bench.papers import hydraserve as h
from bench.papers.constants import hydraserve as c
from bench.papers.core import Case, Options, Result, label, vary_profile
from bench.papers.core import run as run_case
from bench.papers.hydraserve_fig7 import PROMPT, measure
from simulator.config import Startup
from simulator.workloads.request import Request

NAME = "hydraserve-fig8"
STEPS = ("vLLM", "+Prefetch", "+Stream", "+Overlap", "+Parallel")


def case(kind: str, model: str, step: str, slower: float = 1.0) -> Case:
    """Return the case of one step of the ablation.

    "+Stream" also has the "implementation optimizations" (section 8.2): from here on it waits for
    HydraServe's floor, not vLLM's.
    """
    at = STEPS.index(step)
    vllm, _, ours = (floor * slower for floor in c.floors(kind))
    container, context, libraries = (ours * part for part in c.SPLIT)
    start = Startup(
        container_s=container if at >= 2 else vllm,
        context_s=context if at >= 2 else 0.0,
        libraries_s=libraries if at >= 2 else 0.0,
        prefetch=at >= 1,
        stream=at >= 2,
        overlap=at >= 3,
    )
    machines = h.first_test_bed(kind, "serverless-vllm")
    machines = machines.model_copy(update={"runtime": machines.runtime.model_copy(update={"startup": start})})
    models = (h.group(model, model, "summarization", 1).model_copy(update={"kinds": frozenset()}),)
    profile = vary_profile(h.HYDRA, "hydraserve", choose=h.choose_stages(4 if at == 4 else 1))
    return Case(
        label(device=kind, model=model, step=step), machines, models, lambda seed: [Request(1.0, model, PROMPT, 8)], profile
    )


def run(options: Options) -> Result:
    result = Result(NAME, "techniques one by one (seconds to the first token)")
    pairs = (("a10", "Llama2-7B"), ("v100", "Llama2-13B"))
    result.measure_cases((case(k, m, s) for k, m in pairs for s in STEPS), Options(seeds=1), measure)
    for kind, model in pairs:
        for before, after in pairwise(STEPS):
            ratio = result.row(device=kind, step=after).divide_by(result.row(device=kind, step=before), "ttft_s")
            result.claim_below("8.2, Fig. 8", f"{model}, {after}: shorter than without (ratio)", ratio)
    result.notes.append(
        "Overlap gains nothing here because fetching takes longer than container, context, libraries and loading in turn: 6.74 s and 6.71 s "
        "for Llama2-7B on A10, 13.0 s and 11.8 s for Llama2-13B on V100."
    )
    for factor in (0.5, 1.5) if options.sensitivity else ():
        for kind, model in pairs:
            with_, without = (run_case(case(kind, model, step, factor), 0) for step in ("+Overlap", "+Stream"))
            gain = measure(with_)["ttft_s"] / measure(without)["ttft_s"]
            result.notes.append(f"Sensitivity, times beside the bytes x {factor}: {model}, +Overlap over without: {gain:.2f}.")
    result.notes.append("The paper's values are plot only; nothing is drawn: one run.")
    return result
