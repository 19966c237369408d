"""Estimates, verdicts, and the format of results."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from bench.papers.core import (
    Case,
    Claim,
    Estimate,
    Options,
    Result,
    Row,
    claims_of,
    estimate,
    format_result,
    run,
    summary,
    vary_profile,
    write,
)
from bench.papers.traffic import SHAREGPT, azure_like, bursts, shares
from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.common import keep_until_needed
from simulator.config import ClusterFile, Fixed, LinkSpeeds, ModelGroup, NodeGroup, Runtime
from simulator.simulate import simulate
from simulator.workloads.request import Request


def test_an_estimate_is_the_mean_with_students_interval() -> None:
    """An estimate is the mean with Student's interval.

    1, 2, 3: standard deviation 1; t of 2 degrees of freedom is 4.303.
    """
    found = estimate([1.0, 2.0, 3.0, None])
    half = 4.303 / math.sqrt(3)
    assert (found.mean, found.seeds) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert estimate([5.0]) == Estimate(5.0, 5.0, 5.0, 1)
    assert math.isnan(estimate([]).mean)


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [
        (Estimate(10, 9, 11, 5), 12.0, "yes"),  # within a quarter
        (Estimate(10, 9, 11, 5), 15.0, "no"),
        (Estimate(10, 5.5, 14.5, 5), 14.0, "unsure"),  # only the interval holds it
        (Estimate(10, 3, 17, 5), 11.0, "unsure"),  # an interval that carries no information
        (Estimate(10, -50, 70, 5), 60.0, "unsure"),
        (estimate([]), 1.0, "unsure"),
    ],
)
def test_verdict_follows_from_the_paper_and_the_measurement(ours: Estimate, paper: float, verdict: str) -> None:
    assert Claim("1", "", ours, paper).verdict == verdict


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [
        (1.03, 1.12, "no"),  # 8 % apart as a ratio; a quarter of the effect
        (1.11, 1.12, "yes"),
        (1.58, 1.87, "no"),
        (3.82, 4.74, "yes"),
        (0.37, 0.23, "no"),  # within a quarter of the reduction, far from the ratio
    ],
)
def test_ratio_is_also_judged_by_its_effect(ours: float, paper: float, verdict: str) -> None:
    assert Claim("1", "", estimate([ours]), paper, neutral=1.0).verdict == verdict


def test_share_near_one_is_judged_in_percentage_points() -> None:
    assert Claim("1", "", estimate([0.83]), 0.97, points=0.1).verdict == "no"
    assert Claim("1", "", estimate([0.89]), 0.97, points=0.1).verdict == "yes"
    assert Claim("1", "", estimate([0.11]), 0.04, points=0.1).verdict == "no"


def test_order_claim_needs_a_margin_and_an_interval_on_one_side() -> None:
    assert Claim("1", "", estimate([0.97]), below=1.0).verdict == "no"
    assert Claim("1", "", estimate([0.9]), below=1.0).verdict == "yes"
    assert Claim("1", "", estimate([1.2]), below=1.0).verdict == "no"
    assert Claim("1", "", estimate([1.2]), above=1.0).verdict == "yes"
    assert Claim("1", "", Estimate(0.9, 0.7, 1.1, 3), below=1.0).verdict == "unsure"
    assert Claim("1", "", Estimate(0.9, 0.8, 0.95, 3), below=1.0).verdict == "yes"


def test_a_stated_interval_or_bound() -> None:
    assert Claim("1", "", estimate([1.07]), low=1.08, high=1.19).verdict == "no"
    assert Claim("1", "", estimate([1.1]), low=1.08, high=1.19).verdict == "yes"
    assert Claim("1", "", Estimate(1.1, 1.0, 1.2, 3), low=1.08, high=1.19).verdict == "unsure"
    assert Claim("1", "", estimate([0.96]), at_least=0.99).verdict == "no"
    assert Claim("1", "", Estimate(0.9, 0.7, 1.1, 3), at_least=0.8).verdict == "unsure"
    assert Claim("1", "", estimate([57.0]), at_most=63).verdict == "yes"
    assert Claim("1", "", estimate([57.0]), at_most=63).stated == "<= 63.0"


def test_comparison_of_thaw_with_itself_can_be_equal() -> None:
    assert Claim("ours", "", Estimate(1.0, 1.0, 1.0, 10), below=1.0, own=True).verdict == "equal"
    assert Claim("ours", "", Estimate(0.97, 0.96, 0.98, 10), below=1.0, own=True).verdict == "yes"
    assert Claim("ours", "", Estimate(1.03, 1.02, 1.04, 10), below=1.0, own=True).verdict == "no"


def test_ratios_are_computed_per_seed() -> None:
    one, two = Row({}, [{"x": 2.0}, {"x": 30.0}]), Row({}, [{"x": 1.0}, {"x": 10.0}])
    assert one.divide_by(two, "x").mean == 2.5


def test_results_as_a_table_and_as_json(tmp_path: Path) -> None:
    result = Result("name", "title", [Row({"policy": "a"}, [{"x": 1.0}, {"x": 2.0}], {"x": 3.0})])
    result.number("§1", "stated", result.rows[0]["x"], 1.5)
    result.claim_below("§1", "missing", estimate([]))
    text = format_result(result)
    assert "| a | 1.50 [-4.85, 7.85] (paper 3.00) |" in text
    assert "| §1 | stated | 1.50 | 1.50 [-4.85, 7.85] | unsure |" in text
    write([result], tmp_path, {"seeds": 2})
    document = json.loads((tmp_path / "name.json").read_text())
    assert document["rows"][0]["figures"]["x"]["seeds"] == 2
    assert document["rows"][0]["runs"]["x"] == [1.0, 2.0]
    assert [c["agrees"] for c in document["claims"]] == ["unsure", "unsure"]
    assert claims_of(document)[0] == Claim("§1", "stated", Estimate(1.5, -4.853, 7.853, 2), 1.5)
    assert document["settings"] == {"seeds": 2}
    assert "| name (2 x 1) | §1 | stated | 1.50 | 1.50 [-4.85, 7.85] | unsure |" in summary(tmp_path)
    assert summary(tmp_path).startswith("Of 2 statements of the papers 0 agree, 0 do not, and 2 are unsure.")
    assert "plot only" in format_result(Result("n", "t", [Row({}, [{"x": 1.0}])]))


def test_generated_requests_have_the_rate_and_depend_on_the_seed_alone() -> None:
    names, lengths = ("a", "b", "c"), (SHAREGPT,) * 3
    one = azure_like(names, lengths, 2.0, 100.0, 4.0, 1.0, seed=1)
    assert one == azure_like(names, lengths, 2.0, 100.0, 4.0, 1.0, seed=1)
    assert one != azure_like(names, lengths, 2.0, 100.0, 4.0, 1.0, seed=2)
    assert len(one) == 200
    assert all(a.at <= b.at for a, b in pairwise(one))
    assert all(0 <= r.at < 100 and 1 <= r.output_tokens <= SHAREGPT.most for r in one)


def test_zipf_shares_and_burst_arrivals_match_their_parameters() -> None:
    assert shares(2, 1.0) == pytest.approx([2 / 3, 1 / 3])
    times = bursts(5.0, 200.0, 1.0, Random(1))
    assert 800 < len(times) < 1200
    assert bursts(0.0, 10.0, 1.0, Random(1)) == []


def test_options_scale_the_length() -> None:
    assert Options(scale=0.5).seconds(600) == 300


def test_thaw_sees_the_popularity_of_the_moment_on_exclusive_devices() -> None:
    """The device has room for two of three models; a was popular long before c is requested."""
    links = LinkSpeeds(remote=1, ssd=5, device=20)
    node = NodeGroup(devices=1, device_gb=25, dram_gb=100, links=links)
    cluster = ClusterFile(nodes=(node,), runtime=Runtime(exclusive=True, in_dram=True))
    models = tuple(ModelGroup(name=n, weights_gb=10, service=Fixed(seconds=0.1), slo_ttft=9) for n in "abc")
    profile = vary_profile(thaw.PROFILE, "thaw", keep=keep_until_needed)
    times = [*((2.0 * n, "a") for n in range(10)), (20.0, "b"), (500.0, "b"), (600.0, "b"), (610.0, "c"), (620.0, "b")]
    requests = [Request(at, name, 1, 1) for at, name in times]
    outcome = run(Case((), cluster, models, lambda _: requests, profile), 0)
    assert outcome.loads == simulate(cluster, models, requests, profile).loads
    assert {tier: n for tier, n in outcome.loads.items() if n} == {"dram": 3, "ready": 12}
