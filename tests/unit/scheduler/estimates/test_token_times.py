"""The time per token of one engine, from two reports of its load."""

from __future__ import annotations

import pytest

from services.scheduler.domain.estimates.token_times import measure_token_ms, token_s
from shared.contracts.engine import EngineLoad
from tests.unit.scheduler.world import World


def load(tokens: int, active: int = 1, completed: int = 3, waiting: int = 0) -> EngineLoad:
    return EngineLoad(active=active, completed=completed, waiting=waiting, generated_tokens=tokens)


@pytest.mark.parametrize(("active", "tokens", "expected"), [(1, 50, 20.0), (4, 200, 20.0), (2, 10, 200.0)])
def test_sequences_of_a_batch_share_the_tokens(active: int, tokens: int, expected: float) -> None:
    assert measure_token_ms(load(100, active), load(100 + tokens, active), 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("old", "new", "seconds"),
    [
        (load(100), load(150, active=2), 1.0),
        (load(100), load(150, completed=4), 1.0),
        (load(100), load(150, waiting=1), 1.0),
        (load(100), load(101), 1.0),
        (load(100), load(150), 0.1),
        (load(100, active=0), load(150, active=0), 1.0),
    ],
    ids=["another sequence", "one ended", "one waits", "a single token", "too soon", "idle"],
)
def test_reports_of_different_sequences_measure_nothing(old: EngineLoad, new: EngineLoad, seconds: float) -> None:
    assert measure_token_ms(old, new, seconds) is None


def test_tokens_count_since_the_load_changed(w: World) -> None:
    """The node has sent another message since, which repeated the load."""
    w.node()
    w.model("a", slo={"ttft": 10, "tpot": 0.1})
    running = w.up("a")
    running.active, running.generated = 1, 100
    w.report()
    w.now += 0.4
    w.report()
    w.now += 0.6
    running.generated = 150
    w.report()
    assert token_s(w.state, "a") == pytest.approx(0.02)
