"""The order in which the models of one device compute for the keys.

Each model with work to do has a lane. One step of one lane runs at a time, on behalf of one flow:
the requests of one API key and one priority (ADR 0096). `next_turn` chooses among the pairs of a
flow and a lane in which it has requests:

1. Higher priorities go first.
2. Pairs with a request whose deadline has not passed go before others (Torpor §5.2), unless their
   model has low priority: those of models that need the most requests in time until they comply
   (RRC, 0 for those that comply), then the earliest deadline. A flow that is more than `LEAD_S` of
   compute time ahead of the last one loses this precedence, and so does a pair that is as far
   ahead of its flow's last one.
3. Otherwise the flow with the least compute time goes first (start-time fair queueing), and within
   it the lane in which it has used the least.

The flow whose turn it is pays for the step, divided by its weight. The step computes all sequences
of the lane's batch, and its duration hardly depends on their number, so the others cost nothing.
If each paid for its tokens, a key could lose all turns in one model to the steps that it shares in
another.

A tag is compute time: it grows by the duration of each step, or by a part of it (`WEIGHT`) for a
step by rule 2. A flow or a pair that becomes busy starts at the smallest tag of the busy ones
(`ComputeTime.admit`), so that idle time gives no credit. Between two steps of a busy lane, each
other lane of the flow therefore computes for at most `WEIGHT` times `LEAD_S` and the lane's last
step, and two steps, in turns of the flow. The tags of busy flows of one priority differ by at most
`LEAD_S` and one step.

Under overload, models that are far from complying have low priority: deadlines that all models miss
by a little help none of them. Low priority is an equal share of time, not a lesser one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.engine.domain.fair_slots import Flow
from shared.compliance import FIRST_ALPHA, PERIOD_S, low_priority, next_alpha

LEAD_S = 0.5
"""Charged compute time that requests with a deadline may take before others get their share."""
WEIGHT = 4.0
"""Compute time of a step by rule 2, in multiples of the time that is charged for it."""


_MAX_IDLE = 1024
"""Idle flows whose tags are kept."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one flow in one model.

    Args:
        lane: The model's instance.
        flow: The requests of one key and one priority.
        weight: Share of the key relative to others.
        deadline: Time by which the flow's most urgent request in this lane should have its first
            token, in monotonic seconds; None: no request has an objective.
        required: Requests that have to meet the objective in a row until the model complies (RRC).
        is_low: The model has low priority (`Priorities`).
    """

    lane: str
    flow: Flow = Flow()
    weight: float = 1.0
    deadline: float | None = None
    required: float = 0.0
    is_low: bool = False


@dataclass(frozen=True, slots=True)
class Tags:
    """Compute time in seconds since the first use of the device.

    Attributes:
        flow_s: Of the flow, divided by its weight.
        lane_s: The part of it in the lane.
    """

    flow_s: float = 0.0
    lane_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """The work whose step is next.

    Attributes:
        has_precedence: It goes first because of its objective (rule 2).
    """

    work: Work
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


def next_turn(works: Collection[tuple[Work, Tags]], now: float) -> Turn:
    """Return the work whose step runs next.

    Args:
        works: All work, at least one, with its tags. A pair of flow and lane occurs once.
        now: Seconds of the monotonic clock.
    """
    highest = max(work.flow.priority for work, _ in works)
    found = [(work, tags) for work, tags in works if work.flow.priority == highest]
    least = min(tags.flow_s for _, tags in found)
    least_of: dict[Flow, float] = {}
    for work, tags in found:
        least_of[work.flow] = min(tags.lane_s, least_of.get(work.flow, tags.lane_s))
    urgent = [
        (work, tags)
        for work, tags in found
        if work.deadline is not None
        and work.deadline >= now
        and not work.is_low
        and tags.flow_s - least <= LEAD_S
        and tags.lane_s - least_of[work.flow] <= LEAD_S
    ]
    if urgent:  # 2
        return Turn(min(urgent, key=_urgency)[0], has_precedence=True)
    return Turn(min(found, key=_share)[0])  # 3


def _share(found: tuple[Work, Tags]) -> tuple[float, float, str, str]:
    work, tags = found
    return tags.flow_s, tags.lane_s, work.lane, work.flow.name


def _urgency(found: tuple[Work, Tags]) -> tuple[float, float | None, float, float, str, str]:
    work, _ = found
    return (-max(work.required, 0.0), work.deadline, *_share(found))


@dataclass(slots=True)
class ComputeTime:
    """The tags of all flows, and of their lanes. Flows of one priority are compared."""

    _flows: dict[Flow, float] = field(default_factory=dict)
    _lanes: dict[Flow, dict[str, float]] = field(default_factory=dict)
    _busy: dict[Flow, frozenset[str]] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)
    _last_lane: dict[Flow, float] = field(default_factory=dict)

    def admit(self, works: Iterable[Work]) -> None:
        """Take note of all work that there is now: flows and lanes that become busy get a tag."""
        lanes_of: dict[Flow, set[str]] = {}
        for work in works:
            lanes_of.setdefault(work.flow, set()).add(work.lane)
        for flow, lanes in lanes_of.items():
            before = self._busy.get(flow)
            if before is None:
                others = [self._flows[f] for f in self._busy if f in lanes_of and f.priority == flow.priority]
                floor = min(others, default=self._last.get(flow.priority, 0.0))
                self._flows[flow] = max(self._flows.get(flow, 0.0), floor)
            if before is None or lanes - before:
                self._admit_lanes(flow, lanes, (before or frozenset()) & lanes)
        self._busy = {flow: frozenset(lanes) for flow, lanes in lanes_of.items()}
        self._forget_idle()

    def _admit_lanes(self, flow: Flow, lanes: set[str], before: frozenset[str]) -> None:
        tags = self._lanes.setdefault(flow, {})
        floor = min((tags[lane] for lane in before), default=self._last_lane.get(flow, 0.0))
        for lane in lanes - before:
            tags[lane] = max(tags.get(lane, 0.0), floor)

    def tags(self, work: Work) -> Tags:
        """Return the tags of work that was admitted."""
        return Tags(self._flows[work.flow], self._lanes[work.flow][work.lane])

    def charge(self, turn: Turn, took_s: float) -> None:
        """A step took `took_s` seconds."""
        work, tags = turn.work, self.tags(turn.work)
        charged = took_s / WEIGHT if turn.has_precedence else took_s
        self._last[work.flow.priority] = max(tags.flow_s, self._last.get(work.flow.priority, 0.0))
        self._last_lane[work.flow] = max(tags.lane_s, self._last_lane.get(work.flow, 0.0))
        self._flows[work.flow] = tags.flow_s + charged / work.weight
        self._lanes[work.flow][work.lane] = tags.lane_s + charged

    def forget(self, lane: str) -> None:
        """The lane is gone."""
        for tags in self._lanes.values():
            tags.pop(lane, None)
        self._busy = {flow: lanes - {lane} for flow, lanes in self._busy.items()}

    def _forget_idle(self) -> None:
        if len(self._flows) > _MAX_IDLE + len(self._busy):
            idle = sorted((f for f in self._flows if f not in self._busy), key=lambda f: self._flows[f])
            for flow in idle[: len(idle) // 2]:
                for tags in (self._flows, self._lanes, self._last_lane):
                    tags.pop(flow, None)
