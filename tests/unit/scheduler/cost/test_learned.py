"""Learned parameters converge, and an outlier moves them by a bounded step."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.domain.cost.learned import GAIN, Parameter, bound_of, observe

positive = st.floats(1e-3, 1e12, allow_nan=False)


def after(measured: list[float], prior: float) -> Parameter:
    known: Parameter | None = None
    for value in measured:
        known = observe(known, value, prior)
    assert known is not None
    return known


@given(positive, st.floats(1e-3, 1e3))
def test_estimate_converges_from_any_prior(value: float, ratio: float) -> None:
    found = after([value] * 60, value * ratio)
    assert found.value == pytest.approx(value, rel=0.01)
    assert found.error == pytest.approx(0.0, abs=value * 0.05)


@given(positive, st.floats(0.0, 0.5), st.integers(0, 2**32))
def test_noisy_estimate_stays_near_the_median_with_a_matching_error(value: float, noise: float, seed: int) -> None:
    random = Random(seed)
    found = after([value * (1 + noise * random.uniform(-1, 1)) for _ in range(100)], value * 3)
    assert found.value == pytest.approx(value, rel=noise + 0.01)
    assert found.error <= value * (2 * noise + 0.01)


@given(st.lists(positive, max_size=20), positive, st.floats(0, 1e15))
def test_outlier_moves_the_estimate_by_a_bounded_step(before: list[float], prior: float, freak: float) -> None:
    known = after(before, prior) if before else Parameter(prior, prior)
    moved = observe(known if before else None, freak, prior)
    gain = max(1 / (known.count + 1), GAIN)
    assert abs(moved.value - known.value) <= gain * bound_of(known) * (1 + 1e-9)


@given(positive, st.integers(20, 60))
def test_estimate_recovers_soon_after_an_outlier(value: float, settled: int) -> None:
    freak = observe(after([value] * settled, value), value * 1000, value)
    assert freak.value <= value * (1 + ROOM_AND_A_HALF)
    back = freak
    for _ in range(20):
        back = observe(back, value, value)
    assert back.value == pytest.approx(value, rel=0.02)


ROOM_AND_A_HALF = GAIN * 0.5 + 1e-6


@given(positive, st.floats(2.0, 100.0))
def test_estimate_follows_a_lasting_change(value: float, factor: float) -> None:
    known = after([value] * 30, value)
    for _ in range(60):
        known = observe(known, value * factor, value)
    assert known.value == pytest.approx(value * factor, rel=0.05)


def test_an_estimate_of_zero_can_grow() -> None:
    known = after([0.0] * 10, 0.0)
    for _ in range(60):
        known = observe(known, 100.0, 0.0, least=10.0)
    assert known.value == pytest.approx(100.0, rel=0.05)
