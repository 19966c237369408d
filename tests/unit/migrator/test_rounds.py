"""Rounds continue, end or are given up, and their times are learned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.migrator.domain.rounds import MAX_ROUNDS, OUTLIER_FACTOR, Speed, learn_speed, next_step

FAST = Speed(a=0.1, b=10.0)
"""A destination ten times as fast as a source of a thousand tokens a second."""


@pytest.mark.parametrize(
    ("gap", "last_gap", "rounds", "speed", "rate", "expected"),
    [
        (4, 1000, 1, FAST, 100.0, "hand_over"),  # 1: less than the fixed cost
        (500, 1000, 1, FAST, 100.0, "round"),  # 2: sixty milliseconds leave six tokens
        (500, 400, 1, FAST, 100.0, "round"),  # 2: one round is no evidence
        (800, 400, 3, FAST, 100.0, "hand_over"),  # 3: it does not shrink, and costs 90 ms
        (2000, 1000, 3, FAST, 100.0, "give_up"),  # 4: grows, and costs 210 ms
        (300, 310, 3, Speed(a=20.0, b=10.0), 100.0, "give_up"),  # 4: the destination is slower than the source
        (30, 40, MAX_ROUNDS, Speed(a=1.0, b=500.0), 50.0, "hand_over"),  # a round's fixed cost determines the remainder
    ],
)
def test_next_step_follows_from_gap_rounds_and_speed(
    gap: int, last_gap: int, rounds: int, speed: Speed, rate: float, expected: str
) -> None:
    assert next_step(gap, last_gap, rounds, speed, rate, 100.0) == expected


@given(
    a=st.floats(0.01, 5.0),
    b=st.floats(1.0, 300.0),
    rate=st.floats(1.0, 2000.0),
    total=st.integers(1, 100_000),
    pause=st.floats(0, 500),
)
def test_every_migration_is_decided_in_few_rounds(a: float, b: float, rate: float, total: int, pause: float) -> None:
    speed, gap, last = Speed(a, b), total, total
    for rounds in range(1, MAX_ROUNDS + 2):
        last, gap = gap, int(rate / 1e3 * speed.predict_ms(gap))
        step = next_step(gap, last, rounds, speed, rate, pause)
        if step != "round":
            assert step == "hand_over" or rate * a >= 500.0 or speed.predict_ms(gap) > pause
            return
    raise AssertionError("it never ends")


@given(st.floats(0.05, 2.0), st.floats(5.0, 100.0))
def test_time_per_token_and_fixed_time_are_learned(a: float, b: float) -> None:
    speed = Speed()
    for tokens in (900, 30, 4, 500, 20, 2, 1200, 60, 5):
        speed = learn_speed(speed, tokens, a * tokens + b)
    assert speed.a == pytest.approx(a, rel=0.2)
    assert speed.b == pytest.approx(b, rel=0.35, abs=3)


def test_outlier_round_moves_the_speed_by_a_bounded_step() -> None:
    speed = Speed()
    for tokens in (900, 30, 4, 500, 20):
        speed = learn_speed(speed, tokens, 0.1 * tokens + 10)
    before = speed.predict_ms(100)
    assert learn_speed(speed, 100, 60_000).predict_ms(100) <= before * OUTLIER_FACTOR
    assert learn_speed(speed, 0, 50.0) == speed


def test_slow_first_round_of_an_engine_is_corrected_by_the_next() -> None:
    """Measured with vLLM: 2.9 s, then always 0.1 s.

    Without the correction a migration that is nearly complete would be given up.
    """
    speed = learn_speed(Speed(), 51, 2_888.0)
    assert speed.predict_ms(51) == pytest.approx(2_888.0)
    speed = learn_speed(speed, 51, 92.9)
    assert speed.predict_ms(51) == pytest.approx(92.9)
    speed = learn_speed(speed, 29, 120.5)
    assert next_step(36, 29, 2, speed, 300.0, 50.0) == "hand_over"


def test_one_fast_round_does_not_discard_a_well_known_speed() -> None:
    """One quick round does not refute a well-known estimate.

    The destination may still have had a prefix, for instance.
    """
    speed = Speed()
    for tokens in (900, 30, 4, 500, 20, 400):
        speed = learn_speed(speed, tokens, tokens + 50.0)
    assert learn_speed(speed, 500, 20.0).predict_ms(500) > 250
