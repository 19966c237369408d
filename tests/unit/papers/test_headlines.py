"""Each paper's first claim, and that of Thaw's profile, in short runs.

The runs have few seeds. The same seeds give the same figures, so only a change of the code makes a
test fail. docs/papers.md has long runs of more seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from bench.papers import hydraserve, hydraserve_fig14, serverlessllm, tangram, thaw_beside
from bench.papers.core import Case, Measure, Options, run
from bench.simulator import torpor as torpor_small
from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Profile
from simulator.config import names_of
from simulator.policies import PROFILES
from simulator.simulate import simulate
from simulator.workloads.synthetic import synthetic

SHORT = Options(seeds=3, scale=0.2, sensitivity=False)


def mean_of(case: Callable[[Profile], Case], profile: Profile, measure: Measure, figure: str, seeds: int = SHORT.seeds) -> float:
    return fmean(measure(run(case(profile), seed))[figure] for seed in range(seeds))


def test_serverlessllm_has_lower_latency_than_shepherd_and_random() -> None:
    """Section 7.3, Fig. 8e: start-up latency on ShareGPT at 0.8 requests per second."""
    seconds = SHORT.seconds(660)
    p99 = [
        mean_of(lambda p: serverlessllm.case("OPT-6.7B", "ShareGPT", 0.8, p, seconds), p, serverlessllm.measure, "p99_s")
        for p in serverlessllm.SCHEDULERS
    ]
    assert p99[0] < min(p99[1:])


def test_torpor_meets_more_objectives_than_simple_swap() -> None:
    small = torpor_small()
    traffic = synthetic(replace(small.workload, seconds=20), names_of(small.models), 1)
    met = [simulate(small.cluster, small.models, traffic, PROFILES[n], 1).figures() for n in ("torpor", "simple-swap")]
    assert met[0]["slo_attainment"] > met[1]["slo_attainment"]
    assert met[0]["functions_compliant"] > met[1]["functions_compliant"]


@pytest.mark.parametrize("level", ["L1", "L3"])
def test_tangram_loads_faster_than_its_baseline(level: str) -> None:
    """Section 5.5, Fig. 12a."""
    loads = [
        mean_of(lambda p: tangram.build_single_device(p, level, 16, 60), p, tangram.measure, "load_s")
        for p in (tangram.TANGRAM, tangram.SLLM_CM)
    ]
    assert loads[0] < loads[1]


def test_hydraserve_answers_a_burst_sooner_in_groups_that_become_all_workers() -> None:
    """Section 8.4, Fig. 14: 128 requests on 16 devices."""
    outcomes = {g: run(hydraserve_fig14.case(128, g, hydraserve_fig14.machines()), 0) for g in (1, 4, None)}
    single, four, chosen = (hydraserve_fig14.measure(outcomes[g]) for g in (1, 4, None))
    assert outcomes[None].stages == outcomes[4].stages == [4] * 4
    assert outcomes[4].successors == [4] * 4
    assert single["instances"] == four["instances"] == 16
    assert single["unserved"] == four["unserved"] == chosen["unserved"] == 0
    assert single["mean_ttft_s"] > 1.5 * four["mean_ttft_s"]
    assert single["tpot_ms"] < four["tpot_ms"] < 1.19 * single["tpot_ms"]
    assert chosen == four


def test_hydraserve_meets_more_objectives_than_both_baselines() -> None:
    """Section 8.3, Fig. 9: CV 8, 0.6 requests per second."""
    met = [
        mean_of(lambda p: hydraserve.end_to_end(p, 8, 0.6, SHORT.seconds(1200)), p, hydraserve.measure, "attainment", seeds=2)
        for p in (hydraserve.HYDRA, hydraserve.VLLM, hydraserve.SLLM)
    ]
    assert met[0] > max(met[1:])


@pytest.mark.parametrize("name", [s.name for s in thaw_beside.settings(SHORT) if s.name != "mixed"])
def test_thaw_equals_the_papers_policy_on_the_papers_experiment(name: str) -> None:
    """Thaw equals the paper's policy on the paper's own experiment.

    The margin is 5 %: so few requests and seeds are no more exact.
    """
    setting = next(s for s in thaw_beside.settings(SHORT) if s.name == name)
    ours, theirs = (
        [setting.measure(run(setting.case(p), seed)) for seed in range(SHORT.seeds)] for p in (thaw.PROFILE, setting.others[0])
    )
    assert fmean(r["p99_ttft_s"] for r in ours) <= 1.05 * fmean(r["p99_ttft_s"] for r in theirs)
    assert fmean(r["in_time"] for r in ours) >= 0.99 * fmean(r["in_time"] for r in theirs)


def test_thaw_beats_the_papers_policies_on_the_mixed_workload() -> None:
    """Thaw beats the papers' policies on the mix of workloads.

    Two policies are compared, the best ones there; the others queue, and take far longer to
    simulate.
    """
    setting = thaw_beside.settings(replace(SHORT, scale=1.0))[-1]
    assert setting.name == "mixed"
    ours, *others = (
        [setting.measure(run(setting.case(p), seed)) for seed in range(SHORT.seeds)]
        for p in (thaw.PROFILE, PROFILES["hydraserve"], PROFILES["tangram"])
    )
    for theirs in others:
        assert fmean(r["p99_ttft_s"] for r in ours) < fmean(r["p99_ttft_s"] for r in theirs)
        assert fmean(r["in_time"] for r in ours) > fmean(r["in_time"] for r in theirs)
