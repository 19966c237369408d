"""Fair shares of the keys whose requests compete for one model's slots.

A flow is the requests of one API key and one priority. Each flow has a tag: the tokens that it has
received and is predicted to receive for its running sequences, divided by its weight (Sheng et al.,
Fairness in Serving Large Language Models, OSDI 2024, with predictions as in start-time fair
queueing). A waiting sequence gets a slot in this order:

1. Sequences that lost their memory, and the one that has the turn, keep their place before all
   others (`step_planning`, rules 3 to 5; `elastic_kv`, rule 5).
2. Higher priorities first, then the flow with the smallest tag, and in a flow the order of arrival.
3. If no slot is free, a sequence pauses the newest one of the flow that has received the most, if
   its own flow then still has less, or has the higher priority. The paused sequence keeps its keys
   and values as long as there is memory, and waits before the others of its flow.
4. Nothing is paused if the memory would not suffice for the new sequence, or for a sequence that
   was preempted `MAX_PREEMPTIONS` times.

A flow that begins to wait is at most `CREDIT` batches of its own requests behind the others: a key
that sends little may use all slots for a short time, and one that was idle does not monopolise the
model afterwards. Rule 3 cannot alternate between two sequences: after a pause the paused one's flow
would need a smaller tag than before to reverse it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.engine.domain.step_planning import Limits, SequenceView, fits

CREDIT = 3
"""Requests for each slot that a flow may be behind the others when it begins to wait."""
EXPECTED_TOKENS = 256
"""Predicted length of a response, unless its limit is lower."""
_MAX_IDLE = 1024
"""Idle flows whose tags are kept."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The requests of one API key and one priority.

    Attributes:
        name: Opaque id of the key; empty: requests without a key.
    """

    priority: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A sequence that has a slot or waits for one.

    Attributes:
        cost: Tokens that are predicted to be computed for it from now on, divided by the weight.
    """

    view: SequenceView
    flow: Flow
    cost: float


@dataclass(frozen=True)
class Arrangement:
    """The changes before the next step.

    Attributes:
        first: Keys of the waiting sequences that are admitted first, in order; the others follow.
        paused: Keys of the running sequences that lose their slots, newest first.
    """

    first: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()


def predict_cost(length: int, prompt: int, greatest_length: int, received: int, weight: float) -> float:
    """Predict the tokens that a sequence will still receive, divided by the weight.

    Args:
        length: Tokens of the sequence now.
        prompt: Tokens of its prompt.
        greatest_length: Tokens that it may have in the end.
        received: Tokens that were computed for it; recomputed ones count once.
        weight: Weight of its key.
    """
    end = min(greatest_length, prompt + EXPECTED_TOKENS)
    return max(1, max(length, end) - received) / weight


@dataclass(slots=True)
class ReceivedTokens:
    """Tokens that each flow has received, divided by its weight."""

    _by_flow: dict[Flow, float] = field(default_factory=dict)

    def add(self, flow: Flow, tokens: float) -> None:
        """Count tokens that were computed for a flow, divided by its weight."""
        self._by_flow[flow] = self._by_flow.get(flow, 0.0) + tokens

    def tags(self, running: Iterable[Claim]) -> dict[Flow, float]:
        """Return the tags of all flows."""
        found = dict(self._by_flow)
        for claim in running:
            found[claim.flow] = found.get(claim.flow, 0.0) + claim.cost
        return found

    def begin_waiting(self, claim: Claim, running: Sequence[Claim], waiting: Sequence[Claim], slots: int) -> None:
        """A sequence arrives, and no other one of its flow waits.

        Args:
            claim: The sequence.
            running: Sequences with a slot.
            waiting: The other waiting sequences.
            slots: Slots of the model.
        """
        flow, tags = claim.flow, self.tags(running)
        active = {c.flow for c in (*running, *waiting) if c.flow.priority == flow.priority}
        others = [tags.get(other, 0.0) for other in active - {flow}]
        if others:
            floor = min(others) - CREDIT * slots * claim.cost
            self._by_flow[flow] = max(self._by_flow.get(flow, floor), floor)
            self._forget_idle(active | {flow})
        else:  # a flow that was alone owes nothing
            own = self._by_flow.get(flow, 0.0)
            self._by_flow = {f: t for f, t in self._by_flow.items() if f.priority != flow.priority} | {flow: own}

    def _forget_idle(self, active: set[Flow]) -> None:
        if len(self._by_flow) > _MAX_IDLE + len(active):
            idle = sorted((f for f in self._by_flow if f not in active), key=lambda f: self._by_flow[f])
            for flow in idle[: len(idle) // 2]:
                del self._by_flow[flow]


def arrange(
    running: Sequence[Claim],
    waiting: Sequence[Claim],
    tags: Mapping[Flow, float],
    limits: Limits,
    turn: int | None = None,
) -> Arrangement:
    """Decide who gets the slots of the next step.

    Args:
        running: Sequences with a slot, in the order of admission.
        waiting: Waiting sequences, in their present order.
        tags: Tags of all flows (`ReceivedTokens.tags`).
        limits: Slots and blocks.
        turn: Key of the sequence with the granted turn.
    """
    if len({c.flow for c in waiting} | {c.flow for c in running}) < 2:
        return Arrangement()
    kept = [c for c in waiting if c.view.key == turn] + [c for c in waiting if c.view.preemptions and c.view.key != turn]
    draft = _Draft([*running, *kept], tags, limits, turn)
    for claim in kept:
        draft.charge(claim)
    waiting_of: dict[Flow, deque[Claim]] = defaultdict(deque)
    for claim in waiting:
        if claim.view.key != turn and not claim.view.preemptions:
            waiting_of[claim.flow].append(claim)
    first = [c.view.key for c in kept]
    while waiting_of:
        flow = min(waiting_of, key=lambda f: (-f.priority, draft.tags[f], waiting_of[f][0].view.key))
        claim = waiting_of[flow].popleft()
        if not waiting_of[flow]:
            del waiting_of[flow]
        if not draft.has_slot and (kept or not draft.pause_for(claim)):
            first.append(claim.view.key)
            break
        draft.take_slot(claim)
        first.append(claim.view.key)
    return Arrangement(tuple(first), tuple(draft.paused))


class _Draft:
    def __init__(self, running: list[Claim], tags: Mapping[Flow, float], limits: Limits, turn: int | None) -> None:
        self.running = running
        self.tags = defaultdict(float, tags)
        self.limits = limits
        self.turn = turn
        self.paused: list[int] = []
        self._admitted: set[int] = set()

    @property
    def has_slot(self) -> bool:
        return len(self.running) < self.limits.max_sequences

    def charge(self, claim: Claim) -> None:
        self.tags[claim.flow] += claim.cost

    def take_slot(self, claim: Claim) -> None:
        self.running.append(claim)
        self._admitted.add(claim.view.key)
        self.charge(claim)

    def pause_for(self, claim: Claim) -> bool:
        """Apply rules 3 and 4; return whether a sequence was paused."""
        victim = self._find_victim(claim)
        if victim is None:
            return False
        left = [c for c in self.running if c is not victim]
        if not fits([c.view for c in left], claim.view, self.limits):
            return False
        self.running = left
        self.tags[victim.flow] -= victim.cost
        self.paused.append(victim.view.key)
        return True

    def _find_victim(self, claim: Claim) -> Claim | None:
        tag = self.tags[claim.flow] + claim.cost
        worse = [
            (-c.flow.priority, self.tags[c.flow], i, c)
            for i, c in enumerate(self.running)
            if c.view.key not in self._admitted
            and c.view.key != self.turn
            and not c.view.is_aged
            and (c.flow.priority < claim.flow.priority or (c.flow.priority == claim.flow.priority and tag < self.tags[c.flow]))
        ]
        return max(worse, key=lambda found: found[:3])[3] if worse else None
