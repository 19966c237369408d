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
and its figures are those of all of them. The least of several noisy figures is too low, so that the
ratio to the best is too high. From two draws on there is a second ratio without this bias: the
best of the others is chosen on one half of the draws, and `thaw` is compared with it on the other
half, and the reverse (cross-fitting). With --profiles copy-1 copy-2 copy-3, `thaw` is compared with
copies of itself whose predicted times have errors, which shows what chance alone does.

Busy instances compute in turns of equal time; with --no-sharing each computes as if it were alone,
and with --sharing memory they share a device by their booked memory (HydraServe §4.1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result of one draw of a case's requests.

    Attributes:
        ttft: Seconds of each request; of one that failed, the time-out.
        in_time: Requests that met their objective.
    """

    ttft: Sequence[float]
    in_time: int


def simulate_draws(seed: int, profile: str, setting: Setting = DEFAULT) -> list[Drawn]:
    """Simulate all draws of a case with a profile."""
    found = []
    for repeat in range(setting.seeds):
        case = draw(seed, setting.length, repeat)
        runtime = case.cluster.runtime.model_copy(update={"share_compute": setting.sharing})
        cluster = case.cluster.model_copy(update={"runtime": runtime})
        outcome = simulate(cluster, case.models, case.requests, (PROFILES | COPIES)[profile], seed)
        ttft = [s.ttft for s in outcome.served]
        ttft += [runtime.timeout_s] * (len(case.requests) - len(outcome.served))
        found.append(Drawn(ttft, sum(s.in_time for s in outcome.served)))
    return found


def figures_of(seed: int, profile: str, setting: Setting = DEFAULT) -> dict[str, float]:
    """Simulate a case with a profile."""
    return figures(simulate_draws(seed, profile, setting))


def figures(draws: Sequence[Drawn]) -> dict[str, float]:
    """Return the figures of the requests of all these draws."""
    ttft = [seconds for d in draws for seconds in d.ttft]
    return {
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p99_s": percentile(ttft, 99),
        "missed": 1 - sum(d.in_time for d in draws) / len(ttft),
    }


def run_case(seed: int, profiles: Sequence[str], setting: Setting) -> dict[str, Any]:
    drawn = {name: simulate_draws(seed, name, setting) for name in profiles}
    found = {name: figures(draws) for name, draws in drawn.items()}
    ratio = ratios(found)
    if setting.seeds > 1:
        for measure, value in cross_fitted_ratios(drawn).items():
            ratio[measure]["cross_fitted"] = value
    return {"seed": seed, "about": draw(seed, setting.length).about, "profiles": found, "ratios": ratio}


def cross_fitted_ratios(drawn: Mapping[str, Sequence[Drawn]]) -> dict[str, float]:
    """Return by measure the ratio of `thaw` to a profile that is chosen on other draws.

    The best of the others is chosen on every second draw, and `thaw` is compared with it on the
    remaining draws, and the reverse. The ratio is the mean of both.
    """
    halves = [{name: figures(draws[first::2]) for name, draws in drawn.items()} for first in (0, 1)]
    return {
        measure: statistics.fmean(
            _ratio(held, measure, _best_of_others(chosen, measure)) for chosen, held in (halves, halves[::-1])
        )
        for measure in MEASURES
    }


def ratios(found: Mapping[str, Figures]) -> dict[str, dict[str, Any]]:
    """Return by measure the ratio of `thaw` to the best of the others, and which that is."""
    ratio: dict[str, dict[str, Any]] = {}
    for measure in MEASURES:
        best = _best_of_others(found, measure)
        ratio[measure] = {"ratio": _ratio(found, measure, best), "best": best}
    return ratio


def _best_of_others(found: Mapping[str, Figures], measure: str) -> str:
    return min((name for name in found if name != OURS), key=lambda name: (found[name][measure], name))


def _ratio(found: Mapping[str, Figures], measure: str, other: str) -> float:
    ours, theirs = found[OURS][measure], found[other][measure]
    if measure == "missed":
        ours, theirs = 1 + ours, 1 + theirs
    return ours / max(theirs, 1e-9)


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the distribution of each ratio, and how often each other profile was the best.

    With several draws of each case, `chosen_on_other_draws` has the distribution of the ratio
    without the bias of the choice.
    """
    found: dict[str, Any] = {}
    for measure in MEASURES:
        rows = [c["ratios"][measure] for c in cases]
        best = Counter(row["best"] for row in rows)
        found[measure] = {**_distribution([row["ratio"] for row in rows]), "best_of_others": dict(best.most_common())}
        if cross_fitted := [row["cross_fitted"] for row in rows if "cross_fitted" in row]:
            found[measure]["chosen_on_other_draws"] = _distribution(cross_fitted)
    return found


def _distribution(ratios: Sequence[float]) -> dict[str, float]:
    row = {f"p{p}": round(percentile(ratios, p, default=0.0), 4) for p in (5, 25, 50, 75, 95, 100)}
    return {**row, "ahead_or_equal": sum(ratio <= 1.0001 for ratio in ratios)}


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
        cross_fitted = row.get("chosen_on_other_draws")
        print(measure, "best:", json.dumps({k: v for k, v in row.items() if v is not cross_fitted}))
        if cross_fitted is not None:
            print(measure, "best chosen on other draws:", json.dumps(cross_fitted))
    worst = sorted(cases, key=lambda c: -c["ratios"]["ttft_mean_s"]["ratio"])[: options.worst]
    for case in worst:
        ratio = case["ratios"]["ttft_mean_s"]
        print(f"case {case['seed']}: mean TTFT {ratio['ratio']:.2f} of {ratio['best']}; {json.dumps(case['about'])}")
    if options.json:
        kept = [{"seed": c["seed"], **_list_ratios(c)} for c in cases]
        document = {"machine": machine(), "profiles": options.profiles, **asdict(setting), "summary": found, "cases": kept}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _list_ratios(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of a case by measure, and with several draws the cross-fitted ones."""
    found = {}
    for measure in MEASURES:
        row = case["ratios"][measure]
        found[measure] = round(row["ratio"], 4)
        if "cross_fitted" in row:
            found[f"{measure}_cross_fitted"] = round(row["cross_fitted"], 4)
    return found


if __name__ == "__main__":
    main()
