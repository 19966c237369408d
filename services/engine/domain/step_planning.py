"""Which sequences the next step computes, which of the waiting ones join, and which give way when the KV cache is full.

A sequence is a list of tokens, of which the first `computed` have keys and values. A decoding sequence has one token more than that; a
new one, or one that gave way, has many. A step computes tokens for several sequences at once:

1. Decoding sequences go first, each with its one token.
2. Sequences whose prompt is under way share what is left of the step's tokens. While anything decodes that is `chunk_tokens`, so that a
   long prompt does not hold up the others; alone, a prompt is computed in one step as `model.generate` does it.
3. If a running sequence finds no block to grow into, the youngest running one gives way: it loses its keys and values and waits, ahead of
   the others, to compute them again.
4. If none gave way, waiting sequences join in their order while there is a slot, a token and room for all they are known to need, with a
   spare block for each running sequence. One that does not fit holds up those behind it: nothing starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 128
"""KV memory is counted, and grows, in blocks of this many tokens."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Limits:
    max_sequences: int
    kv_blocks: int
    step_tokens: int
    chunk_tokens: int

    @property
    def kv_tokens(self) -> int:
        """The longest sequence whose keys and values fit. Its last token needs none: nothing is computed after it."""
        return self.kv_blocks * BLOCK_TOKENS


@dataclass(frozen=True)
class AdapterRoom:
    """How adapters share the KV cache's grant of `granted` bytes, in which a block has `block_bytes`. They may take `budget` bytes of it.
    `reserved`: those bytes were added to the grant for them, and are nobody else's."""

    granted: int
    block_bytes: int
    budget: int
    reserved: bool

    def kv_blocks(self, adapter_bytes: int) -> int:
        """What is left for keys and values."""
        return (self.granted - (self.budget if self.reserved else adapter_bytes)) // self.block_bytes


def adapter_room(granted: int, block_bytes: int, reserved: int, longest: int) -> AdapterRoom:
    """Adapters have the `reserved` bytes, if there are any; otherwise they may borrow from keys and values what a sequence of the `longest`
    length leaves, so that no request becomes impossible."""
    if reserved:
        return AdapterRoom(granted, block_bytes, min(reserved, granted), reserved=True)
    return AdapterRoom(granted, block_bytes, max(0, granted - blocks_for(longest) * block_bytes), reserved=False)


@dataclass(frozen=True)
class SequenceView:
    key: int
    length: int
    computed: int = 0

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@dataclass(frozen=True)
class Work:
    """Compute the next `count` tokens of sequence `key`."""

    key: int
    count: int


@dataclass(frozen=True)
class StepPlan:
    work: tuple[Work, ...] = ()
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()


def plan_step(running: Sequence[SequenceView], waiting: Iterable[SequenceView], limits: Limits) -> StepPlan:
    """What to do next. `running` is in the order of admission, `waiting` in the order in which they may join."""
    draft = _Draft(list(running), limits)
    for sequence in (s for s in running if s.remaining == 1):
        draft.grow(sequence, 1)
    for sequence in (s for s in running if s.remaining > 1):
        draft.grow(sequence, min(sequence.remaining, draft.budget))
    admitted: list[int] = []
    if not draft.preempted:
        for sequence in waiting:
            if draft.budget <= 0 or not draft.admit(sequence):
                break
            admitted.append(sequence.key)
    work = tuple(Work(key, count) for key, count in draft.counts.items() if count > 0)
    return StepPlan(work, tuple(admitted), tuple(s.key for s in draft.preempted))


class _Draft:
    def __init__(self, running: list[SequenceView], limits: Limits) -> None:
        self.running = running
        self.limits = limits
        self.counts: dict[int, int] = {}
        self.preempted: list[SequenceView] = []
        decoding = sum(s.remaining == 1 for s in running)
        self.budget = limits.step_tokens if not decoding else min(limits.step_tokens, limits.chunk_tokens)

    def _held(self) -> int:
        return sum(blocks_for(s.computed + self.counts.get(s.key, 0)) for s in self.running)

    def grow(self, sequence: SequenceView, count: int) -> None:
        """Rules 1 to 3. Does nothing for one that has given way already."""
        while sequence in self.running and count > 0:
            growth = blocks_for(sequence.computed + count) - blocks_for(sequence.computed)
            if self._held() + growth <= self.limits.kv_blocks:
                self.counts[sequence.key] = count
                if sequence.remaining > 1:
                    self.budget -= count
                return
            victim = self.running.pop()
            self.counts.pop(victim.key, None)
            self.preempted.insert(0, victim)

    def admit(self, sequence: SequenceView) -> bool:
        """Rule 4."""
        if len(self.running) >= self.limits.max_sequences:
            return False
        promised = sum(blocks_for(s.length) for s in self.running)
        if promised + blocks_for(sequence.length) + len(self.running) > self.limits.kv_blocks:
            return False
        self.running.append(sequence)
        self.counts[sequence.key] = min(sequence.remaining, self.budget)
        self.budget -= self.counts[sequence.key]
        return True
