"""Shares of a batcher's slots: applies `services.engine.domain.fair_slots` to its sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.engine.domain.fair_slots import ReceivedTokens, arrange
from services.engine.domain.step_planning import Limits
from services.engine.generation.sequences import Sequence

_SETTLED_STEPS = 32
"""Steps after which a decision is made again, unless a request arrives or a slot is free.

Only responses that are longer than predicted change the decision in between.
"""


@dataclass(slots=True)
class SlotShares:
    """The tokens that each flow has received. Owned by the computing thread."""

    _received: ReceivedTokens = field(default_factory=ReceivedTokens)
    _settled_steps: int = 0

    def begin_waiting(
        self, sequences: Collection[Sequence], running: Mapping[int, Sequence], waiting: Collection[Sequence], slots: int
    ) -> None:
        """Note the sequences of a new request, before they are added to `waiting`.

        Args:
            sequences: The request's sequences.
            running: Sequences with a slot.
            waiting: Sequences that wait already.
            slots: Slots of the model.
        """
        if not sequences:
            return
        self._settled_steps = 0
        for sequence in sequences:
            sequence.received = sequence.computed
        first = next(iter(sequences))
        flow = first.flow
        if any(s.flow == flow for s in waiting):
            return
        if not waiting and all(s.flow is flow for s in running.values()):
            self._received.begin_waiting(first.claim, (), (), slots)
            return
        self._received.begin_waiting(first.claim, [s.claim for s in running.values()], [s.claim for s in waiting], slots)

    def arrange(
        self, running: Mapping[int, Sequence], waiting: deque[Sequence], limits: Limits, turn: int | None
    ) -> tuple[int, ...]:
        """Order `waiting`, and add the sequences to it that lose their slots.

        Args:
            running: Sequences with a slot, in the order of admission. Not changed.
            waiting: Waiting sequences. Changed.
            limits: Slots and blocks.
            turn: Key of the sequence with the turn (`domain.elastic_kv`).

        Returns:
            The keys of the sequences that the caller removes from `running`.
        """
        if not waiting:
            return ()
        if self._settled_steps and len(running) >= limits.max_sequences:
            self._settled_steps -= 1
            return ()
        flow = waiting[0].flow
        if all(s.flow is flow for s in waiting) and all(s.flow is flow for s in running.values()):
            return ()  # the usual case needs no claims
        self._settled_steps = _SETTLED_STEPS
        claims = [s.claim for s in running.values()]
        arranged = arrange(claims, [s.claim for s in waiting], self._received.tags(claims), limits, turn)
        by_key = {s.key: s for s in waiting}
        first = [by_key.pop(key) for key in arranged.first]
        paused = [running[key] for key in reversed(arranged.paused)]
        rest = list(by_key.values())
        waiting.clear()
        waiting.extend((*first, *paused, *rest))
        return arranged.paused

    def record_computed(self, sequence: Sequence) -> None:
        """Charge the tokens that a step has computed for the first time."""
        if (new := sequence.computed - sequence.received) > 0:
            self._received.add(sequence.flow, new / sequence.request.share.weight)
            sequence.received = sequence.computed
