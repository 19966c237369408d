"""Who gets the slots of a batcher: applies `services.engine.domain.fair_slots` to its sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.engine.domain.fair_slots import ReceivedTokens, arrange
from services.engine.domain.step_planning import Limits
from services.engine.generation.sequences import Sequence


@dataclass(slots=True)
class SlotShares:
    """The tokens that each flow has received. Owned by the computing thread."""

    _received: ReceivedTokens = field(default_factory=ReceivedTokens)

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
        for sequence in sequences:
            sequence.received = sequence.computed
        first = next(iter(sequences))
        flow = first.flow
        if any(s.flow == flow for s in waiting):
            return
        others = [s for s in (*running.values(), *waiting) if s.flow != flow]
        if not others:  # the usual case needs no claims
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
        if not waiting or len({s.flow for s in waiting} | {s.flow for s in running.values()}) < 2:
            return ()
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
