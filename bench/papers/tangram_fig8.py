"""Tangram Fig. 8: time to the first token by model, beside SLLM-CM."""

from __future__ import annotations

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.core import Options, Result, estimate

NAME = "tangram-fig8"
LEVEL = "L3"
"""Section 5.1: "original consecutive request"; the level of this figure is not stated."""


def run(options: Options) -> Result:
    result = Result(NAME, "time to the first token and of loading, by model (seconds)")
    count = max(40, round(600 * options.scale))
    batch = c.BATCH.value
    result.measure_cases([t.build_single_device(p, LEVEL, batch, count) for p in (t.SLLM_CM, t.TANGRAM)], options, t.measure)
    base, ours = result.row(policy="sllm-cm"), result.row(policy="tangram")
    names = t.name_copies(c.MODELS)
    faster = {n: base.divide_by(ours, f"load {n}").mean for n in names}
    shorter = {n: 1 - ours.divide_by(base, f"ttft {n}").mean for n in names}
    result.ratio("5.2, Fig. 8", "loading is faster, the least of the models", estimate([min(faster.values())]), 1.8)
    result.ratio("5.2, Fig. 8", "loading is faster, the most of the models", estimate([max(faster.values())]), 6.2)
    result.share("5.2, Fig. 8", "TTFT is shorter, the least of the models (share)", estimate([min(shorter.values())]), 0.14)
    result.share("5.2, Fig. 8", "TTFT is shorter, the most of the models (share)", estimate([max(shorter.values())]), 0.60)
    share = base["load gpt20B-0"].mean / base["ttft gpt20B-0"].mean
    result.notes.append(
        f"Load is {share:.0%} of SLLM-CM's TTFT for GPT-20B; the paper's 72 % is where the rest of the TTFT is taken from."
    )
    result.notes.append("Sequence generated: the same model again with 0.6 at L3 (ours), else another one of the eight.")
    if options.sensitivity:
        for name, constant in (("pcie", c.PCIE), ("merge", c.MERGE)):
            for factor in (0.5, 1.5):
                part = Result("", "")
                part.measure_cases(
                    [
                        t.build_single_device(p, LEVEL, batch, count, more={name: constant.value * factor})
                        for p in (t.SLLM_CM, t.TANGRAM)
                    ],
                    options,
                    t.measure,
                )
                mine, other = part.row(policy="tangram"), part.row(policy="sllm-cm")
                gain, ttft = other.divide_by(mine, "load_s"), mine.divide_by(other, "ttft_s")
                result.notes.append(f"Sensitivity, {name} x {factor}: loading {gain} times as fast, TTFT over SLLM-CM's {ttft}.")
    return result
