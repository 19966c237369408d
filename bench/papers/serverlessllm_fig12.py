"""ServerlessLLM Fig. 12: GPUs for each server, and models in the cluster."""

from __future__ import annotations

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result

NAME = "serverlessllm-fig12"
RATE = 0.5
"""Not stated for this figure."""
MODELS = (16, 32, 64)
BEST = ("ServerlessLLM", "Ray Serve with cache")


def run(options: Options) -> Result:
    result = Result(NAME, "GPUs per server, and number of models, OPT-6.7B on GSM8K (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    result.measured(
        (s.whole(x, "OPT-6.7B", "GSM8K", RATE, seconds, devices=n) for n in (1, 2, 3, 4) for x in BEST), options, s.measure
    )
    result.measured(
        (s.whole(x, "OPT-6.7B", "GSM8K", RATE, seconds, copies=n) for n in MODELS if n != 32 for x in BEST), options, s.measure
    )
    one, four = (result.row(devices=n, models="32", system=x) for n, x in (("1", BEST[0]), ("4", BEST[1])))
    result.number("7.4, Fig. 12a", "ServerlessLLM with one GPU per server: 4 s", one["mean_s"], 4.0)
    result.number("7.4, Fig. 12a", "Ray Serve with cache with four: 12 s", four["mean_s"], 12.0)
    less = one.over(four, "mean_s")
    result.order(
        "7.4, Fig. 12a", "ServerlessLLM with one GPU is below Ray Serve with cache with four", less, less.high < 1.0, bound=1.0
    )
    gaps = [
        result.row(devices="4", models=str(n), system=BEST[1]).over(
            result.row(devices="4", models=str(n), system=BEST[0]), "mean_s"
        )
        for n in MODELS
    ]
    widens = gaps[0].mean < gaps[-1].mean
    result.order(
        "7.4, Fig. 12b", "the gap (Ray Serve with cache over ServerlessLLM) widens with the number of models", gaps[-1], widens
    )
    result.notes += [f"{n} models: Ray Serve with cache over ServerlessLLM {g}." for n, g in zip(MODELS, gaps, strict=True)]
    result.notes.append(f"The rate is not stated; {RATE} requests per second here.")
    return result
