"""The order in which the models of one device compute.

Each model with work to do has a lane. One step of one lane runs at a time, and `next_lane` chooses
the lane by start-time fair queueing with deadlines:

1. Lanes with a request whose deadline has not passed go first, the earliest deadline first. A lane
   that is more than `LEAD_S` of compute time ahead of the last lane loses this precedence.
2. Otherwise the lane with the least compute time goes first.

A lane's tag is its compute time: it grows by the duration of each of its steps. A lane that becomes
busy starts at the smallest tag of the busy lanes (`admit`), so that idle time gives no credit. A
busy lane therefore waits at most `LEAD_S` and one step of each other lane longer than its fair
share.
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
        tag_s: Compute time of the lane, in seconds since the first use of the device's lanes.
        deadline: Time by which its most urgent request should have its first token, in monotonic
            seconds; None: no request has an objective.
    """

    name: str
    tag_s: float = 0.0
    deadline: float | None = None


def admit(lane: Lane, busy: Iterable[Lane], last_tag_s: float) -> Lane:
    """Return a lane that becomes busy, with its first tag.

    Args:
        lane: The lane.
        busy: The other lanes with work to do.
        last_tag_s: The greatest tag of a lane at the start of a step.
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
