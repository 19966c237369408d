"""Copies of the policy `thaw` whose predicted times have an error.

A copy is no better than `thaw`. The ratio to the best of several copies shows what chance alone
does to a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Ask, Option, Profile, draw_number

ERROR = 0.05
"""Largest error, as a share of the predicted time."""


def vary_predictions(number: int) -> Profile:
    """Return the copy with this number; each has other errors, which depend on the plan alone."""

    def choose(ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
        varied = [_vary(o, f"{number}:{seed}") for o in options]
        chosen = thaw.choose(ask, varied, seed)
        return options[varied.index(chosen)] if chosen is not None else None

    return replace(thaw.PROFILE, name=f"copy-{number}", choose=choose)


def _vary(option: Option, seed: str) -> Option:
    error = ERROR * (2 * draw_number(seed, option.way, *option.key) - 1)
    return replace(option, cost=replace(option.cost, total_s=option.cost.total_s * (1 + error)))


COPIES = {profile.name: profile for profile in map(vary_predictions, (1, 2, 3))}
