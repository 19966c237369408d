"""Tangram Fig. 12: loading over locality, batch size, and size of the model pool."""

from __future__ import annotations

from bench.papers import tangram as t
from bench.papers.constants import tangram as c
from bench.papers.core import Options, Result, Row
from simulator.report import Outcome

NAME = "tangram-fig12"
BATCHES = (1, 16, 64)
POOLS = (120, 160, 200, 260)
"""GB. The pool of eight models grows by further models of the same sizes."""


def pool(gb: float) -> tuple[c.Model, ...]:
    models = list(c.MODELS)
    while sum(m.gb for m in models) < gb:
        models.append(c.MODELS[(len(models) * 3) % len(c.MODELS)])
    return tuple(models)


def run(options: Options) -> Result:
    result = Result(NAME, "mean time of loading (seconds)")
    count = max(40, round(500 * options.scale))
    profiles = (t.SLLM_CM, t.TANGRAM)
    result.measure_cases(
        (t.build_single_device(p, level, b, count) for level in c.CV for b in BATCHES for p in profiles), options, part
    )
    result.measure_cases(
        (
            t.build_single_device(p, level, 16, count, pool(gb), f"grown {gb} GB")
            for level in c.CV
            for gb in POOLS
            for p in profiles
        ),
        options,
        part,
    )

    def ratio(level: str, batch: int, **where: str) -> Row:
        mine, other = (result.row(locality=level, batch=str(batch), policy=p.name, **where) for p in (t.TANGRAM, t.SLLM_CM))
        return Row({}, [{"ratio": a["load_s"] / b["load_s"]} for a, b in zip(mine.runs, other.runs, strict=True)])

    worst = ratio("L1", 64)["ratio"]
    result.claim_alike("5.5, Fig. 12a", "L1, batch 64: as SLLM (ratio)", worst)
    by_level = [ratio(level, 16) for level in c.CV]
    result.claim_above(
        "5.5, Fig. 12a",
        "less locality, less gain (load over SLLM's: L1 over L4, batch 16)",
        by_level[0].divide_by(by_level[-1], "ratio"),
    )
    by_batch = [ratio("L3", b) for b in BATCHES]
    result.claim_above(
        "5.5, Fig. 12a",
        "larger batches, less gain (load over SLLM's: batch 64 over 1, L3)",
        by_batch[-1].divide_by(by_batch[0], "ratio"),
    )
    large = [ratio(level, 16, pool=f"grown {POOLS[-1]} GB")["ratio"] for level in c.CV]
    least, most = min(large, key=lambda e: e.mean), max(large, key=lambda e: e.mean)
    result.ratio("5.5, Fig. 12b", "pool beyond 200 GB, batch 16: load over SLLM's, the least of the levels", least, 0.23)
    result.ratio("5.5, Fig. 12b", "pool beyond 200 GB, batch 16: load over SLLM's, the most of the levels", most, 0.56)
    if options.sensitivity:
        base = dict(c.REPEATED)
        for factor in (0.5, 1.5):
            c.REPEATED.update({k: min(0.95, v * factor) for k, v in base.items()})
            again = Result("", "")
            again.measure_cases((t.build_single_device(p, "L3", 16, count) for p in profiles), options.few, part)
            gain = again.row(policy="tangram").divide_by(again.row(policy="sllm-cm"), "load_s")
            result.notes.append(
                f"Sensitivity, how likely the same model is requested again (L3) x {factor}: load over SLLM-CM's {gain}."
            )
        c.REPEATED.update(base)
    return result


def part(outcome: Outcome) -> dict[str, float]:
    return {k: v for k, v in t.measure(outcome).items() if " " not in k}
