"""Parameters learned online: a value, its mean absolute error, and the number of samples.

The rule is a stochastic approximation with a clipped innovation (Huber): a measurement moves the
value by a share of the difference, and the difference is clipped at three times the usual error (or
half the value, if larger). An outlier moves the value by a bounded step, and a lasting change is
followed, since the error grows with it. The first measurement counts fully within that bound.
"""

from __future__ import annotations

from services.scheduler.domain.values import value

GAIN = 0.3
"""Share of the newest difference, after the first few samples."""
BOUND = 3.0
"""Differences beyond this many errors are clipped."""
ROOM = 0.5
"""The bound is at least this share of the value."""


@value(frozen=True, slots=True)
class Parameter:
    """A learned value.

    Attributes:
        error: Mean absolute error of its predictions, in the same unit.
        count: Number of measurements; 0: the value is a prior.
    """

    value: float
    error: float = 0.0
    count: int = 0


def observe(known: Parameter | None, measured: float, prior: float, least: float = 0.0) -> Parameter:
    """Return `known` after one more measurement.

    Args:
        known: The parameter; None: only the prior is known.
        measured: The new sample.
        prior: The value before any sample.
        least: A difference too small to matter, in the same unit.
    """
    before = known if known is not None else Parameter(prior, abs(prior))
    bound = bound_of(before, least)
    difference = max(-bound, min(bound, measured - before.value))
    gain = max(1 / (before.count + 1), GAIN)
    return Parameter(before.value + gain * difference, before.error + gain * (abs(difference) - before.error), before.count + 1)


def bound_of(p: Parameter, least: float = 0.0) -> float:
    """Return the largest step that one measurement can cause."""
    return max(BOUND * p.error, ROOM * abs(p.value), least)
