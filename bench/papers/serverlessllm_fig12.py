"""ServerlessLLM Fig. 12: GPUs for each server, and models in the cluster."""

from __future__ import annotations

from operator import sub, truediv

from bench.papers import serverlessllm as s
from bench.papers.constants import serverlessllm as c
from bench.papers.core import Options, Result, Row, estimate

NAME = "serverlessllm-fig12"
RATE = 0.5
"""Not stated for this figure."""
MODELS = (16, 32, 64)
BEST = ("ServerlessLLM", "Ray Serve with cache")


def run(options: Options) -> Result:
    result = Result(NAME, "GPUs per server, and number of models, OPT-6.7B on GSM8K (seconds)")
    seconds = options.seconds(c.DURATION_S.value)
    result.measure_cases(
        (s.build_case(x, "OPT-6.7B", "GSM8K", RATE, seconds, devices=n) for n in (1, 2, 3, 4) for x in BEST), options, s.measure
    )
    result.measure_cases(
        (s.build_case(x, "OPT-6.7B", "GSM8K", RATE, seconds, copies=n) for n in MODELS if n != 32 for x in BEST), options, s.measure
    )
    one, four = (result.row(devices=n, models="32", system=x) for n, x in (("1", BEST[0]), ("4", BEST[1])))
    result.number("7.4, Fig. 12a", "ServerlessLLM with one GPU per server: 4 s", one["mean_s"], 4.0)
    result.number("7.4, Fig. 12a", "Ray Serve with cache with four: 12 s", four["mean_s"], 12.0)
    less = one.divide_by(four, "mean_s")
    result.claim_below("7.4, Fig. 12a", "ServerlessLLM with one GPU is below Ray Serve with cache with four (ratio)", less)
    few, _, many = gaps = [[result.row(devices="4", models=str(n), system=x) for x in reversed(BEST)] for n in MODELS]
    for text, unit, gap in (
        ("seconds between ServerlessLLM and Ray Serve with cache", "s", sub),
        ("Ray Serve with cache over ServerlessLLM", "times", truediv),
    ):
        grown = estimate(gap(*last) / gap(*first) for first, last in zip(_means(few), _means(many), strict=True))
        claim = f"the gap widens with the number of models: {text}, at {MODELS[-1]} models over that at {MODELS[0]}"
        result.claim_above("7.4, Fig. 12b", claim, grown)
        each = ", ".join(
            f"{n} models {estimate(gap(*pair) for pair in _means(rows))}" for n, rows in zip(MODELS, gaps, strict=True)
        )
        result.notes.append(f"The gap in {unit}: {each}. The paper does not say which of the two it means.")
    result.notes.append(f"The rate is not stated; {RATE} requests per second here.")
    return result


def _means(rows: list[Row]) -> list[tuple[float, ...]]:
    """Mean latencies of the systems, seed by seed."""
    return [tuple(r["mean_s"] for r in runs) for runs in zip(*(row.runs for row in rows), strict=True)]
