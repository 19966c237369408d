"""Plans a step: which sequences run, are admitted, or are preempted.

A sequence is a list of tokens, of which the first `computed` have keys and values. A decoding
sequence has one token more than that; a new or preempted one has many. A step computes tokens for
several sequences:

1. Decoding sequences run first, one token each.
2. Sequences in prefill share the remaining tokens of the step, highest priority first: a request
   that may be admitted does not wait for prompts of lower priority, such as those of a batch, and
   those of negative priority have one part in `LOW_SHARE` of a chunk while others run. While
   any sequence decodes that is `chunk_tokens`, so that a long prompt does not delay the others;
   alone, a prompt is computed in one step, as `model.generate` does.
3. If a running sequence finds no block to grow into, the youngest running one of the lowest
   priority is preempted: it loses its keys and values and waits at the head of the queue.
   The protected sequence is never preempted: it waits for memory instead.
4. If no sequence was preempted, waiting sequences are admitted in order (`fair_slots`) while there
   is a slot, a token and room for all they are known to need, with a spare block for each running
   sequence. A sequence that does not fit blocks those behind it, so that none starves.
5. A sequence is preempted at most `MAX_PREEMPTIONS` times. After that it is admitted only where it
   cannot be preempted: as the protected one, before all others, or if guaranteed memory holds the
   running sequences and itself at their greatest length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 128
"""KV memory is counted, and grows, in blocks of this many tokens."""
MAX_PREEMPTIONS = 3
LOW_SHARE = 8
"""Divisor of a chunk for prompts of low priority, as for `background_prefill`: steps stay short."""


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Limits:
    """Slots, blocks and tokens of a step.

    Attributes:
        kv_blocks: Blocks that sequences may use now.
        guaranteed_blocks: Blocks of them that no other process can ask for; None: all.
    """

    max_sequences: int
    kv_blocks: int
    step_tokens: int
    chunk_tokens: int
    guaranteed_blocks: int | None = None

    @property
    def safe_blocks(self) -> int:
        """Return the blocks that stay, whatever others need."""
        return self.kv_blocks if self.guaranteed_blocks is None else min(self.kv_blocks, self.guaranteed_blocks)

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that fit; the last token of a sequence needs no keys and values."""
        return self.kv_blocks * BLOCK_TOKENS


@dataclass(frozen=True)
class LoraBudget:
    """The share of LoRA adapters in the memory granted to the KV cache.

    Args:
        granted: Granted bytes.
        block_bytes: Bytes of a block.
        budget: Bytes that adapters may take.
        reserved: The budget was added to the grant for adapters, and the KV cache may not use it.
    """

    granted: int
    block_bytes: int
    budget: int
    reserved: bool

    def kv_blocks(self, adapter_bytes: int) -> int:
        """Return the number of blocks left for the KV cache."""
        return (self.granted - (self.budget if self.reserved else adapter_bytes)) // self.block_bytes


def lora_budget(granted: int, block_bytes: int, reserved: int, longest: int) -> LoraBudget:
    """Return the memory that LoRA adapters may use.

    They have the `reserved` bytes, if any. Otherwise they may borrow from the KV cache what a
    sequence of the `longest` length leaves free, so that every request remains possible.
    """
    if reserved:
        return LoraBudget(granted, block_bytes, min(reserved, granted), reserved=True)
    return LoraBudget(granted, block_bytes, max(0, granted - blocks_for(longest) * block_bytes), reserved=False)


@dataclass(frozen=True)
class SequenceView:
    """A sequence to plan for.

    Attributes:
        preemptions: Number of its preemptions.
        greatest_length: Tokens that it may have in the end; 0: unknown.
        priority: Of its request; the highest is first.
    """

    key: int
    length: int
    computed: int = 0
    preemptions: int = 0
    greatest_length: int = 0
    priority: int = 0

    @property
    def is_aged(self) -> bool:
        """True if it may not be preempted again."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def remaining(self) -> int:
        return self.length - self.computed


def fits(running: Iterable[SequenceView], sequence: SequenceView, limits: Limits) -> bool:
    """True if there are blocks for all tokens that are known, and a spare block for each."""
    views = list(running)
    promised = sum(blocks_for(s.length) for s in views)
    return promised + blocks_for(sequence.length) + len(views) <= limits.kv_blocks


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


def plan_step(
    running: Sequence[SequenceView], waiting: Iterable[SequenceView], limits: Limits, protected: int | None = None
) -> StepPlan:
    """Plan the next step.

    Args:
        running: Running sequences, in the order of admission.
        waiting: Waiting sequences, in the order in which they may be admitted.
        limits: Slots, tokens and blocks.
        protected: Key of the oldest sequence, if no other process can ask for its memory.
    """
    draft = _Draft(list(running), limits, protected)
    for sequence in (s for s in running if s.remaining == 1):
        draft.grow(sequence, 1)
    queue = _Queue(waiting, draft)
    for sequence in sorted((s for s in running if s.remaining > 1), key=lambda s: -s.priority):
        queue.admit(above=sequence.priority)
        draft.limit_prefill(sequence.priority)
        draft.grow(sequence, min(sequence.remaining, draft.budget))
    queue.admit(above=None)
    admitted = queue.admitted
    work = tuple(Work(key, count) for key, count in draft.counts.items() if count > 0)
    return StepPlan(work, tuple(admitted), tuple(s.key for s in draft.preempted))


class _Queue:
    """Admits waiting sequences in order, until one does not fit."""

    def __init__(self, waiting: Iterable[SequenceView], draft: _Draft) -> None:
        self._waiting = iter(waiting)
        self._draft = draft
        self._next = next(self._waiting, None)
        self.admitted: list[int] = []

    def admit(self, above: int | None) -> None:
        """Apply rule 4 to sequences with a priority over `above`; None: to all."""
        while self._next is not None and (above is None or self._next.priority > above):
            self._draft.limit_prefill(self._next.priority)
            if self._draft.preempted or self._draft.budget <= 0 or not self._draft.admit(self._next):
                return
            self.admitted.append(self._next.key)
            self._next = next(self._waiting, None)


class _Draft:
    def __init__(self, running: list[SequenceView], limits: Limits, protected: int | None) -> None:
        self.running = running
        self.limits = limits
        self.protected = protected
        self.counts: dict[int, int] = {}
        self.preempted: list[SequenceView] = []
        self._is_low = False
        decoding = sum(s.remaining == 1 for s in running)
        self.budget = limits.step_tokens if not decoding else min(limits.step_tokens, limits.chunk_tokens)

    def limit_prefill(self, priority: int) -> None:
        """Apply rule 2 to sequences of `priority` and below, if any of higher priority runs."""
        if priority < 0 and any(s.priority > priority for s in self.running):
            self.budget = min(self.budget, max(1, self.limits.chunk_tokens // LOW_SHARE)) if not self._is_low else self.budget
            self._is_low = True

    def _used_blocks(self) -> int:
        return sum(blocks_for(s.computed + self.counts.get(s.key, 0)) for s in self.running)

    def grow(self, sequence: SequenceView, count: int) -> None:
        """Apply rules 1 to 3; a preempted sequence is skipped."""
        while sequence in self.running and count > 0:
            growth = blocks_for(sequence.computed + count) - blocks_for(sequence.computed)
            if self._used_blocks() + growth <= self.limits.kv_blocks:
                self.counts[sequence.key] = count
                if sequence.remaining > 1:
                    self.budget -= count
                return
            lowest = min(s.priority for s in self.running)
            victim = next(s for s in reversed(self.running) if s.priority == lowest)
            if victim.key == self.protected:
                return
            self.running.remove(victim)
            self.counts.pop(victim.key, None)
            self.preempted.insert(0, victim)

    def admit(self, sequence: SequenceView) -> bool:
        """Apply rules 4 and 5; return False if the sequence has to wait."""
        if len(self.running) >= self.limits.max_sequences:
            return False
        if sequence.is_aged and not self._is_safe(sequence):
            return False
        if not fits(self.running, sequence, self.limits):
            return False
        self.running.append(sequence)
        self.counts[sequence.key] = min(sequence.remaining, self.budget)
        self.budget -= self.counts[sequence.key]
        return True

    def _is_safe(self, sequence: SequenceView) -> bool:
        """True if the sequence cannot be preempted once it is admitted (rule 5)."""
        if sequence.key == self.protected:
            return not self.running
        views = (*self.running, sequence)
        if not all(s.greatest_length for s in views):
            return False
        return sum(blocks_for(s.greatest_length) for s in views) <= self.limits.safe_blocks
