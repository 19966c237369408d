"""The cases and the figures of bench.regret."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.regret import MEASURES, Drawn, Setting, figures_of, run_case, summary
from bench.regret_cases import draw
from bench.regret_copies import COPIES
from services.scheduler.domain.cost.cost import Cost
from services.scheduler.domain.policies.port import Ask, DeviceView, Option, Profile
from simulator.config import ClusterFile, ModelGroup
from simulator.report import Outcome, Served
from simulator.workloads.request import Request


def test_summary_has_the_percentiles_of_the_ratios_in_any_order() -> None:
    cases = [{"ratios": {m: {"ratio": n / 100, "best": "lru"} for m in MEASURES}} for n in range(200, 0, -1)]
    for row in summary(cases).values():
        assert {p: row[f"p{p}"] for p in (5, 25, 50, 75, 95, 100)} == {5: 0.1, 25: 0.5, 50: 1.0, 75: 1.5, 95: 1.9, 100: 2.0}
        assert (row["ahead_or_equal"], row["best_of_others"]) == (100, {"lru": 200})


def test_best_that_is_chosen_on_other_draws_is_not_the_best_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two profiles is the best of one draw by chance, and the worst of the other."""
    seconds = {"thaw": (2.0, 2.0), "lru": (1.0, 4.0), "native": (3.0, 1.0)}

    def simulate_draws(seed: int, profile: str, setting: Setting) -> list[Drawn]:
        return [Drawn([ttft], in_time=1) for ttft in seconds[profile]]

    monkeypatch.setattr("bench.regret.simulate_draws", simulate_draws)
    case = run_case(7, tuple(seconds), Setting(seeds=2))
    row = summary([case])["ttft_mean_s"]
    assert (row["p50"], row["best_of_others"]) == (1.0, {"native": 1})
    assert row["chosen_on_other_draws"]["p50"] == pytest.approx((2 / 4 + 2 / 3) / 2, abs=1e-4)


def test_one_draw_of_a_case_has_no_other_draws_to_choose_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.regret.simulate_draws", lambda *_: [Drawn([1.0], in_time=1)])
    case = run_case(7, ("thaw", "lru"), Setting())
    assert all("chosen_on_other_draws" not in row for row in summary([case]).values())


def test_longer_case_has_more_requests_and_bursts_for_the_same_models() -> None:
    for seed in range(20):
        case, longer = draw(seed), draw(seed, length=4)
        assert (case.cluster, case.models) == (longer.cluster, longer.models)
        assert longer.about == {**case.about, "seconds": pytest.approx(4 * float(case.about["seconds"]), abs=4)}
        assert longer.requests[-1].at <= 4 * (float(case.about["seconds"]) + 1)
    requests = [sum(len(draw(seed, length=n).requests) for seed in range(20)) for n in (1, 4)]
    assert requests[1] == pytest.approx(4 * requests[0], rel=0.2)


def test_draws_of_a_case_differ_in_their_requests_only() -> None:
    first, second = draw(7), draw(7, repeat=1)
    assert (first.cluster, first.models, first.about) == (second.cluster, second.models, second.about)
    assert first.requests != second.requests


def test_figures_of_a_case_are_of_the_requests_of_all_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of the draw with n requests has a TTFT of n s; of the second draw one fails."""
    draws = [draw(7, repeat=n) for n in range(2)]
    counts = [len(d.requests) for d in draws]

    def simulate(
        cluster: ClusterFile, models: Sequence[ModelGroup], requests: Sequence[Request], profile: Profile, seed: int
    ) -> Outcome:
        ttft, served = float(len(requests)), len(requests) - (tuple(requests) == draws[1].requests)
        return Outcome([Served("m", 0.0, 0.0, ttft, 0.0, in_time=True)] * served)

    monkeypatch.setattr("bench.regret.simulate", simulate)
    found, timeout_s = figures_of(7, "lru", Setting(seeds=2)), draws[0].cluster.runtime.timeout_s
    assert found["ttft_mean_s"] == pytest.approx((counts[0] ** 2 + counts[1] * (counts[1] - 1) + timeout_s) / sum(counts))
    assert found["missed"] == pytest.approx(1 / sum(counts))


def test_copies_of_the_policy_differ_in_their_choice_between_similar_options_only() -> None:
    asked = Ask("m", 1, 0.0)

    def option(key: str, seconds: float) -> Option:
        return Option((DeviceView(key, "n", 10, 10),), "load", Cost(seconds))

    similar, different = [option("n/0", 10.0), option("n/1", 10.2)], [option("n/0", 10.0), option("n/1", 12.0)]
    chosen = {found.key for n in range(50) if (found := COPIES["copy-1"].choose(asked, similar, str(n))) is not None}
    assert chosen == {("n/0",), ("n/1",)}
    assert all(COPIES["copy-1"].choose(asked, different, str(n)) is different[0] for n in range(50))
