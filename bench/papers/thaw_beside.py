"""Compare Thaw's own profile with each paper's policy, on that paper's workload.

Machines, models and requests are the paper's. The figures are the 99th percentile of the time to
the first token, the share within the objective, and the paper's own metrics. The last case is a
mixed workload: large and small models, batching and not, hot and cold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.papers import hydraserve as h
from bench.papers import serverlessllm as s
from bench.papers import tangram as t
from bench.papers import tangram_fig13
from bench.papers import torpor as o
from bench.papers.constants import hydraserve as hc
from bench.papers.constants import serverlessllm as sc
from bench.papers.constants import torpor as oc
from bench.papers.core import Case, Figures, Measure, Options, Result, Row, label, vary_profile
from bench.papers.tangram_fig12 import part
from bench.simulator import build_mixed_case
from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Profile
from shared.percentiles import percentile
from simulator.config import names_of
from simulator.policies import PROFILES, serverlessllm
from simulator.report import Outcome
from simulator.workloads.synthetic import synthetic

NAME = "thaw-beside"
FUNCTIONS = 160


@dataclass(frozen=True, slots=True)
class Setting:
    """`case`: of a policy; `better`: the figure, and whether more of it is better."""

    name: str
    others: tuple[Profile, ...]
    case: Callable[[Profile], Case]
    measure: Measure
    better: tuple[tuple[str, bool], ...]


def tail(outcome: Outcome, since: float = 0.0) -> Figures:
    """Return tail latency and in-time share of requests from `since` on.

    A request that was given up is not in time, and has the longest wait.
    """
    waits = sorted(s.ttft for s in outcome.served if s.at >= since)
    lost = sum(at >= since for _, at, _ in outcome.given_up)
    met = sum(s.in_time for s in outcome.served if s.at >= since)
    total = max(1, len(waits) + lost)
    longest = waits[-1] if waits else 0.0
    return {"p99_ttft_s": percentile([*waits, *[longest] * lost], 99, default=0.0), "in_time": met / total}


def on_serverlessllm(outcome: Outcome) -> Figures:
    every = sorted([x.at for x in outcome.served] + [at for _, at, _ in outcome.given_up])
    return {**tail(outcome, every[len(every) // s.WARM_UP] if every else 0.0), **s.measure(outcome)}


def of_all(outcome: Outcome) -> Figures:
    mean = sum(x.ttft for x in outcome.served) / max(1, len(outcome.served))
    return {**tail(outcome), "mean_ttft_s": mean}


BOTH = (("p99_ttft_s", False), ("in_time", True))


def settings(options: Options) -> list[Setting]:
    """Return the settings; Thaw's keep-alive is the paper's.

    Keep-alive is a setting of the model, not a choice of the policy.
    """
    seconds = options.seconds(sc.DURATION_S.value)
    sllm = serverlessllm.PROFILE
    return [
        Setting(
            "ServerlessLLM, ShareGPT at 0.8 RPS",
            (sllm,),
            lambda p: s.case("OPT-6.7B", "ShareGPT", 0.8, replace(p, keep=sllm.keep), seconds),
            on_serverlessllm,
            (*BOTH, ("p99_s", False), ("mean_s", False)),
        ),
        Setting(
            f"Torpor, {FUNCTIONS} functions",
            (o.VARIANTS[0],),
            lambda p: o.case(FUNCTIONS, replace(p, keep=o.VARIANTS[0].keep), options.seconds(oc.DURATION_S.value / 4)),
            lambda outcome: {**tail(outcome, o.WARM_UP_S), **o.measure(outcome)},
            (*BOTH, ("compliant_share", True), ("p98_cv_ms", False), ("p98_bert_ms", False)),
        ),
        Setting(
            "Tangram, 4 devices at 0.4 RPS",
            (t.TANGRAM,),
            lambda p: ours_on_tangram(p, options),
            lambda outcome: {**tail(outcome), **part(outcome)},
            (*BOTH, ("load_s", False)),
        ),
        Setting(
            "HydraServe, CV 8 at 0.6 RPS",
            (h.HYDRA,),
            lambda p: on_hydraserve(p, options),
            lambda outcome: {**tail(outcome), **h.measure(outcome)},
            (*BOTH, ("mean_ttft_s", False)),
        ),
        Setting(
            "mixed",
            tuple(PROFILES[n] for n in ("serverlessllm", "torpor", "tangram", "hydraserve", "swapservellm")),
            lambda p: on_mixed(p, options),
            of_all,
            (*BOTH, ("mean_ttft_s", False)),
        ),
    ]


def on_mixed(profile: Profile, options: Options) -> Case:
    case = build_mixed_case()
    names = names_of(case.models)
    workload = replace(case.workload, seconds=options.seconds(case.workload.seconds))
    return Case(label(policy=profile.name), case.cluster, case.models, lambda seed: synthetic(workload, names, seed), profile)


def ours_on_tangram(profile: Profile, options: Options) -> Case:
    """Return the case of a profile on the machine that retains weights.

    The machine allocates KV blocks on demand.
    """
    case = tangram_fig13.case(vary_profile(t.TANGRAM, "tangram"), 0.4, 4, options.seconds(tangram_fig13.SECONDS))
    return replace(case, profile=replace(profile, keep=t.release), label=(*case.label[:-1], ("policy", profile.name)))


def on_hydraserve(profile: Profile, options: Options) -> Case:
    """Every policy on HydraServe's workers, which prefetch, stream and overlap."""
    case = h.end_to_end(h.HYDRA, 8, 0.6, options.seconds(hc.DURATION_S.value))
    return replace(case, profile=profile, label=(*case.label[:-1], ("policy", profile.name)))


def run(options: Options) -> Result:
    result = Result(NAME, "Thaw's profile beside each paper's own")
    for setting in settings(options):
        if options.only.lower() in setting.name.lower():
            every = Result("", "")
            every.measure_cases([setting.case(p) for p in (thaw.PROFILE, *setting.others)], options, setting.measure)
            compare(result, setting, every.rows)
    result.notes.append("Not in any paper: the same machines and requests, with Thaw's profile in the place of the paper's policy.")
    return result


def compare(result: Result, setting: Setting, rows: Sequence[Row]) -> None:
    """`rows`: Thaw's, then the others'."""
    for row in rows:
        row.label = {"setting": setting.name, "policy": row.label["policy"]}
        row.runs = [{f: r[f] for f, _ in setting.better if f in r} for r in row.runs]
    result.rows += rows
    ours, *others = rows
    for theirs in others:
        for figure, more in setting.better:
            ratio = ours.divide_by(theirs, figure)
            add = result.claim_above if more else result.claim_below
            add("ours", f"{setting.name}: {figure}, thaw's over {theirs.label['policy']}'s", ratio, own=True)
