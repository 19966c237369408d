"""The order in which the models of one device compute.

Each model with work to do has a lane. A step of one lane runs at a time, and `next_lane` decides
whose (start-time fair queueing, with deadlines on top):

1. Lanes whose most urgent request has a deadline that has not passed go first, earliest deadline
   first, unless they are more than `LEAD_S` of compute time ahead of the lane that is furthest
   behind.
2. Else the lane that has had the least compute time goes first.

Compute time is counted in tags: a lane's tag grows by the duration of each of its steps. A lane
that becomes busy starts at the tag of those that compute (`admit`), so that idle time is not saved
up. A busy lane therefore waits for at most `LEAD_S` and one step of each other lane more than its
fair share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

LEAD_S = 0.5
"""Compute time that requests with a deadline may take before others get their share."""


@dataclass(frozen=True)
class Lane:
    """The steps of one model.

    Args:
        name: The model's instance.
        tag_s: Compute time that it has had, in seconds since the device's lanes were first used.
        deadline: When its most urgent request should have its first token, in seconds of the
            monotonic clock; None: no request has an objective.
    """

    name: str
    tag_s: float = 0.0
    deadline: float | None = None


def admit(lane: Lane, busy: Iterable[Lane], last_tag_s: float) -> Lane:
    """Return the lane as it becomes busy.

    Args:
        lane: The lane.
        busy: The other lanes with work to do.
        last_tag_s: The greatest tag at which a step has begun.
    """
    floor = min((other.tag_s for other in busy), default=last_tag_s)
    return replace(lane, tag_s=max(lane.tag_s, floor))


def next_lane(busy: Iterable[Lane], now: float) -> Lane:
    """Return the lane whose step runs next.

    Args:
        busy: The lanes with work to do, at least one.
        now: Seconds of the monotonic clock.
    """
    lanes = list(busy)
    least = min(lane.tag_s for lane in lanes)
    urgent = [
        (lane.deadline, lane.tag_s, lane.name, lane)
        for lane in lanes
        if lane.deadline is not None and lane.deadline >= now and lane.tag_s - least <= LEAD_S
    ]
    if urgent:  # 1
        return min(urgent, key=lambda found: found[:3])[3]
    return min(lanes, key=lambda lane: (lane.tag_s, lane.name))  # 2


def charge(lane: Lane, took_s: float) -> Lane:
    """Return the lane after a step of `took_s` seconds."""
    return replace(lane, tag_s=lane.tag_s + took_s)
