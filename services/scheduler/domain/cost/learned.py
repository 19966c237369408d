"""Parameters learned online from what was measured. Each is a value with its mean absolute error and how often it was seen.

The rule is a stochastic approximation with a clipped innovation (Huber's): a measurement moves the value by its share of the difference, and a
difference beyond three times the usual error (or half the value, where that is more) counts as just that much. So one freak measurement moves it by
a bounded step, and a change that lasts is followed, since the error grows with it.

The first measurement counts whole, but for the bound: a prior is as wrong as it is large.
"""

from __future__ import annotations

from services.scheduler.domain.values import value

GAIN = 0.3
"""Share of the newest difference, once there have been a few."""
BOUND = 3.0
"""Errors beyond which a difference is taken for a freak."""
ROOM = 0.5
"""… but never less than this share of the value."""


@value(frozen=True, slots=True)
class Parameter:
    """`error`: mean absolute error of what it predicted, in its own unit. `count` 0: a prior."""

    value: float
    error: float = 0.0
    count: int = 0


def observe(known: Parameter | None, measured: float, prior: float, least: float = 0.0) -> Parameter:
    """`known` (None: nothing but the `prior`) after one more measurement. `least`: a difference too small to matter, in the same unit."""
    before = known if known is not None else Parameter(prior, abs(prior))
    bound = bound_of(before, least)
    difference = max(-bound, min(bound, measured - before.value))
    gain = max(1 / (before.count + 1), GAIN)
    return Parameter(before.value + gain * difference, before.error + gain * (abs(difference) - before.error), before.count + 1)


def bound_of(p: Parameter, least: float = 0.0) -> float:
    """The most that one measurement can move it by."""
    return max(BOUND * p.error, ROOM * abs(p.value), least)
