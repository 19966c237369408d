"""Thaw's own profile beside each paper's policy, on that paper's machines, models and requests: what the paper measures, and its objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.papers import hydraserve as h
from bench.papers import serverlessllm as s
from bench.papers import tangram as t
from bench.papers import tangram_fig13
from bench.papers import torpor as o
from bench.papers.constants import hydraserve as hc
from bench.papers.constants import serverlessllm as sc
from bench.papers.constants import torpor as oc
from bench.papers.core import Case, Measure, Options, Result, varied
from bench.papers.tangram_fig12 import part
from services.scheduler.domain.policies import serverlessllm, thaw
from services.scheduler.domain.policies.port import Profile

NAME = "thaw-beside"
FUNCTIONS = 160


@dataclass(frozen=True, slots=True)
class Setting:
    """`case`: of a policy; `better`: the figure, and whether more of it is better."""

    name: str
    best: Profile
    case: Callable[[Profile], Case]
    measure: Measure
    better: tuple[tuple[str, bool], ...]


def settings(options: Options) -> list[Setting]:
    """Thaw's keep-alive is the paper's: it is a setting of the model, not a choice of the policy."""
    seconds = options.seconds(sc.DURATION_S.value)
    sllm = serverlessllm.PROFILE
    return [
        Setting(
            "ServerlessLLM, ShareGPT at 0.8 RPS",
            sllm,
            lambda p: s.case("OPT-6.7B", "ShareGPT", 0.8, replace(p, keep=sllm.keep), seconds),
            s.measure,
            (("p99_s", False), ("mean_s", False)),
        ),
        Setting(
            f"Torpor, {FUNCTIONS} functions",
            o.VARIANTS[0],
            lambda p: o.case(FUNCTIONS, replace(p, keep=o.VARIANTS[0].keep), options.seconds(oc.DURATION_S.value / 4)),
            o.measure,
            (("compliant_share", True), ("p98_cv_ms", False), ("p98_bert_ms", False)),
        ),
        Setting(
            "Tangram, 4 devices at 0.4 RPS",
            t.TANGRAM,
            lambda p: ours_on_tangram(p, options),
            part,
            (("p99_ttft_s", False), ("load_s", False)),
        ),
        Setting(
            "HydraServe, CV 8 at 0.6 RPS",
            h.HYDRA,
            lambda p: on_hydraserve(p, options),
            h.measure,
            (("attainment", True), ("mean_ttft_s", False)),
        ),
    ]


def ours_on_tangram(profile: Profile, options: Options) -> Case:
    """Every policy on the machine that retains weights and allocates KV blocks on demand."""
    case = tangram_fig13.case(varied(t.TANGRAM, "tangram"), 0.4, 4, options.seconds(tangram_fig13.SECONDS))
    return replace(case, profile=replace(profile, keep=t.release), label=(*case.label[:-1], ("policy", profile.name)))


def on_hydraserve(profile: Profile, options: Options) -> Case:
    """Every policy on HydraServe's workers, which prefetch, stream and overlap."""
    case = h.end_to_end(h.HYDRA, 8, 0.6, options.seconds(hc.DURATION_S.value))
    return replace(case, profile=profile, label=(*case.label[:-1], ("policy", profile.name)))


def run(options: Options) -> Result:
    result = Result(NAME, "Thaw's profile beside each paper's own")
    for setting in settings(options):
        both = Result("", "")
        both.measured([setting.case(p) for p in (thaw.PROFILE, setting.best)], options, setting.measure)
        ours, theirs = both.rows
        for row in both.rows:
            row.label = {"setting": setting.name, "policy": row.label["policy"]}
            row.runs = [{f: r[f] for f, _ in setting.better if f in r} for r in row.runs]
        result.rows += both.rows
        for figure, more in setting.better:
            ratio = ours.over(theirs, figure)
            as_good = ratio.mean >= 1 if more else ratio.mean <= 1
            result.order("ours", f"{setting.name}: {figure}, thaw's over {theirs.label['policy']}'s", ratio, as_good, bound=1.0)
    result.notes.append("Not in any paper: the same machines and requests, with Thaw's profile in the place of the paper's policy.")
    return result
