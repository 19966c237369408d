"""The order in which the models of one device compute.

Each model with work to do has a lane. One step of one lane runs at a time. `next_turn` chooses the
lane by start-time fair queueing, with precedence for objectives (Torpor §5.2):

1. Lanes with a request whose deadline has not passed go first, unless they have low priority: those
   that need the most requests in time until they comply (RRC, 0 for those that comply), then the
   earliest deadline. A lane that is more than `LEAD_S` of compute time ahead of the last lane loses
   this precedence.
2. Otherwise the lane with the least compute time goes first.

A lane's tag is its compute time: it grows by the duration of each of its steps, or by a part of it
(`WEIGHT`) for a step by rule 1. A lane that becomes busy starts at the smallest tag of the busy
lanes (`admit`), so that idle time gives no credit. Between two steps of a busy lane, each other
lane therefore computes for at most `WEIGHT` times `LEAD_S` and the lane's last step, and two steps.

Under overload, models that are far from complying have low priority: deadlines that all models miss
by a little help none of them. Low priority is an equal share of time, not a lesser one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shared.compliance import FIRST_ALPHA, PERIOD_S, low_priority, next_alpha

LEAD_S = 0.5
"""Charged compute time that requests with a deadline may take before others get their share."""
WEIGHT = 4.0
"""Compute time of a step by rule 1, in multiples of the time that is charged for it."""


@dataclass(frozen=True)
class Lane:
    """The steps of one model.

    Args:
        name: The model's instance.
        tag_s: Compute time of the lane, in seconds since the first use of the device's lanes.
        deadline: Time by which its most urgent request should have its first token, in monotonic
            seconds; None: no request has an objective.
        required: Requests that have to meet the objective in a row until the model complies (RRC).
        is_low: The model has low priority (`Priorities`).
    """

    name: str
    tag_s: float = 0.0
    deadline: float | None = None
    required: float = 0.0
    is_low: bool = False


@dataclass(frozen=True)
class Turn:
    """The lane of the next step.

    Attributes:
        has_precedence: It goes first because of its objective (rule 1).
    """

    lane: Lane
    has_precedence: bool = False


@dataclass(frozen=True)
class Priorities:
    """The share of models with high priority, which adapts to the share of models that comply.

    Attributes:
        alpha: The share of missing requests that have high priority.
        ratio: The share of models that complied at the start of the period.
        since: The start of the period, in monotonic seconds; None: no period has begun.
        low: Models with low priority.
    """

    alpha: float = FIRST_ALPHA
    ratio: float = 1.0
    since: float | None = None
    low: frozenset[str] = frozenset()


def update_priorities(known: Priorities, required: Mapping[str, float], now: float) -> Priorities:
    """Return the priorities for the present RRC of each model.

    Args:
        known: The last priorities.
        required: RRC by model, of models whose requests were counted.
        now: Seconds of the monotonic clock.
    """
    if not required:
        return replace(known, low=frozenset())
    alpha, ratio, since = known.alpha, known.ratio, now if known.since is None else known.since
    if now - since >= PERIOD_S:
        present = sum(needed <= 0 for needed in required.values()) / len(required)
        alpha, ratio, since = next_alpha(alpha, ratio, present), present, now
    return Priorities(alpha, ratio, since, low_priority(required, alpha))


def admit(lane: Lane, busy: Iterable[Lane], last_tag_s: float) -> Lane:
    """Return a lane that becomes busy, with its first tag.

    Args:
        lane: The lane.
        busy: The other lanes with work to do.
        last_tag_s: The greatest tag of a lane at the start of a step.
    """
    floor = min((other.tag_s for other in busy), default=last_tag_s)
    return replace(lane, tag_s=max(lane.tag_s, floor))


def next_turn(busy: Iterable[Lane], now: float) -> Turn:
    """Return the lane whose step runs next.

    Args:
        busy: The lanes with work to do, at least one.
        now: Seconds of the monotonic clock.
    """
    lanes = list(busy)
    least = min(lane.tag_s for lane in lanes)
    urgent = [
        (-max(lane.required, 0.0), lane.deadline, lane.tag_s, lane.name, lane)
        for lane in lanes
        if lane.deadline is not None and lane.deadline >= now and not lane.is_low and lane.tag_s - least <= LEAD_S
    ]
    if urgent:  # 1
        return Turn(min(urgent, key=lambda found: found[:4])[4], has_precedence=True)
    return Turn(min(lanes, key=lambda lane: (lane.tag_s, lane.name)))  # 2


def charge(lane: Lane, took_s: float, *, has_precedence: bool = False) -> Lane:
    """Return the lane after a step of `took_s` seconds."""
    return replace(lane, tag_s=lane.tag_s + (took_s / WEIGHT if has_precedence else took_s))
