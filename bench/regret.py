"""`thaw` against every other profile, on clusters and workloads drawn at random, in the simulator.

    python -m bench.regret [--cases 200] [--first 0] [--length 1] [--seeds-per-case 1]
                           [--sharing turns] [--workers N] [--json PATH]

Each case is simulated with each profile, with equal requests. For each case and measure, the ratio
is that of `thaw` to the best of the others: the best is chosen afterwards, so that no profile can
be ahead of 1 everywhere. The measures are the mean and the 99th percentile of the time to the first
token, and the share of requests that missed their objective or failed, as (1 + missed) so that the
ratio exists where none is missed. Requests that failed count with the time-out.

A case has about 600 requests, so that a few bad starts change its ratio. With --length N the
workloads last N times as long; with --seeds-per-case N the requests of a case are drawn N times,
and its figures are those of all of them. With --profiles copy-1 copy-2 copy-3, `thaw` is compared
with copies of itself whose predicted times have errors, which shows what chance alone does.

Busy instances compute in turns of equal time; with --no-sharing each computes as if it were alone,
and with --sharing memory they share a device by their booked memory (HydraServe §4.1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from bench.regret_cases import draw
from bench.regret_copies import COPIES
from bench.report import machine
from shared.percentiles import percentile
from simulator.policies import PROFILES
from simulator.simulate import simulate

OURS = "thaw"
MEASURES = ("ttft_mean_s", "ttft_p99_s", "missed")
Figures = Mapping[str, float]
Sharing = Literal["turns", "memory", "none"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all cases have in common.

    Attributes:
        length: Length of each workload, in its first lengths.
        seeds: Draws of the requests of each case, of which the figures are.
    """

    sharing: Sharing = "turns"
    length: int = 1
    seeds: int = 1


DEFAULT = Setting()


def figures_of(seed: int, profile: str, setting: Setting = DEFAULT) -> dict[str, float]:
    """Simulate a case with a profile."""
    ttft: list[float] = []
    in_time = 0
    for repeat in range(setting.seeds):
        case = draw(seed, setting.length, repeat)
        runtime = case.cluster.runtime.model_copy(update={"share_compute": setting.sharing})
        cluster = case.cluster.model_copy(update={"runtime": runtime})
        outcome = simulate(cluster, case.models, case.requests, (PROFILES | COPIES)[profile], seed)
        ttft += [s.ttft for s in outcome.served]
        ttft += [runtime.timeout_s] * (len(case.requests) - len(outcome.served))
        in_time += sum(s.in_time for s in outcome.served)
    return {
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p99_s": percentile(ttft, 99),
        "missed": 1 - in_time / len(ttft),
    }


def run_case(seed: int, profiles: Sequence[str], setting: Setting) -> dict[str, Any]:
    found = {name: figures_of(seed, name, setting) for name in profiles}
    return {"seed": seed, "about": draw(seed, setting.length).about, "profiles": found, "ratios": ratios(found)}


def ratios(found: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """Return by measure the ratio of `thaw` to the best of the others, and which that is."""
    ratio: dict[str, dict[str, Any]] = {}
    for measure in MEASURES:
        others = {name: f[measure] for name, f in found.items() if name != OURS}
        best = min(others, key=lambda name: (others[name], name))
        ours, theirs = found[OURS][measure], others[best]
        if measure == "missed":
            ours, theirs = 1 + ours, 1 + theirs
        ratio[measure] = {"ratio": ours / max(theirs, 1e-9), "best": best}
    return ratio


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the distribution of each ratio, and how often each other profile was the best."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        values = [c["ratios"][measure]["ratio"] for c in cases]
        best: dict[str, int] = {}
        for c in cases:
            best[c["ratios"][measure]["best"]] = best.get(c["ratios"][measure]["best"], 0) + 1
        found[measure] = {
            **{f"p{p}": round(percentile(values, p, default=0.0), 4) for p in (5, 25, 50, 75, 95, 100)},
            "ahead_or_equal": sum(v <= 1.0001 for v in values),
            "best_of_others": dict(sorted(best.items(), key=lambda item: -item[1])),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="Seed of the first case.")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    others = sorted(set(PROFILES) - {OURS})
    parser.add_argument("--profiles", nargs="+", default=others, choices=[*others, *COPIES], metavar="PROFILE")
    parser.add_argument("--length", type=int, default=1, help="The workloads last so many times as long.")
    parser.add_argument("--seeds-per-case", type=int, default=1, help="Draws of the requests of each case.")
    parser.add_argument("--sharing", choices=get_args(Sharing), default="turns")
    parser.add_argument("--no-sharing", dest="sharing", action="store_const", const="none")
    parser.add_argument("--worst", type=int, default=5, help="Cases to print in full.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(options.length, options.seeds_per_case) < 1:
        parser.error("--length and --seeds-per-case must be at least 1")
    setting = Setting(options.sharing, options.length, options.seeds_per_case)
    began = time.perf_counter()
    seeds = range(options.first, options.first + options.cases)
    with ProcessPoolExecutor(options.workers) as pool:
        cases = []
        for case in pool.map(partial(run_case, profiles=(OURS, *options.profiles), setting=setting), seeds):
            cases.append(case)
            if len(cases) % 20 == 0:
                print(f"{len(cases)} of {options.cases} cases, {time.perf_counter() - began:.0f} s", flush=True)
    found = summary(cases)
    for measure, row in found.items():
        print(measure, json.dumps(row))
    worst = sorted(cases, key=lambda c: -c["ratios"]["ttft_mean_s"]["ratio"])[: options.worst]
    for case in worst:
        ratio = case["ratios"]["ttft_mean_s"]
        print(f"case {case['seed']}: mean TTFT {ratio['ratio']:.2f} of {ratio['best']}; {json.dumps(case['about'])}")
    if options.json:
        kept = [{"seed": c["seed"], **{m: round(c["ratios"][m]["ratio"], 4) for m in MEASURES}} for c in cases]
        document = {"machine": machine(), "profiles": options.profiles, **asdict(setting), "summary": found, "cases": kept}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
