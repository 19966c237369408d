"""Sequences prefilled for resumed requests (`PrepareResume`), by name.

They belong to the computing thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.engine.domain.background_prefill import common_prefix_length
from services.engine.domain.step_planning import BLOCK_TOKENS, blocks_for
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import Row, Runner
from shared.errors import Conflict, InsufficientMemory, NotFound, ThawError


@dataclass(frozen=True)
class Computed:
    """Tokens that an order has computed, and those still `left`."""

    tokens: int
    left: int = 0


Outcome = Computed | ThawError


@dataclass(frozen=True)
class PrepareOrder:
    """An order to prefill `sequences`.

    Args:
        name: The name that the resumed request will send.
        sequences: Token ids of each sequence.
        adapter: LoRA adapter, or None.
        variant: The adapter's revision: keys and values of different variants are not
            interchangeable.
        keep_s: Seconds that the result is kept after it is computed.
        within_s: Seconds after which an unfinished order is dropped.
        on_done: Called on the computing thread with the outcome.
        reply_within_s: Seconds after which a partial result is reported.
    """

    name: str
    sequences: tuple[tuple[int, ...], ...]
    adapter: LoraAdapter | None
    variant: str
    keep_s: float
    within_s: float
    on_done: Callable[[Outcome], None]
    reply_within_s: float = math.inf


@dataclass
class PreparedSequence:
    """One sequence.

    Its last token is left to the request, which needs the logits after it.
    """

    tokens: tuple[int, ...]
    state: Any = None
    computed: int = 0

    @property
    def blocks(self) -> int:
        return blocks_for(self.computed)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - 1 - self.computed


@dataclass
class _Entry:
    variant: str
    parts: list[PreparedSequence]
    expires: float
    order: PrepareOrder | None = None
    reply_by: float = math.inf
    done: int = 0

    @property
    def blocks(self) -> int:
        return sum(p.blocks for p in self.parts)

    @property
    def left(self) -> int:
        return sum(max(0, p.remaining) for p in self.parts)


@dataclass
class PreparedPrefixes:
    """Prepared sequences by name. Owned by the computing thread."""

    runner: Runner | None
    _kept: dict[str, _Entry] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return sum(k.blocks for k in self._kept.values())

    @property
    def promised_blocks(self) -> int:
        """Return the blocks of all sequences once they are computed."""
        return sum(blocks_for(len(p.tokens)) for k in self._kept.values() for p in k.parts)

    @property
    def busy(self) -> bool:
        return any(k.order is not None for k in self._kept.values())

    def next_expiry(self) -> float | None:
        """Time of the next expiry in seconds of the monotonic clock, or None."""
        return min((k.expires for k in self._kept.values()), default=None)

    def order(self, order: PrepareOrder, room: int) -> None:
        """Accept an order, or refuse it through `on_done` if it does not fit.

        Args:
            order: The order.
            room: Blocks that running and waiting requests do not need.
        """
        old = self._kept.pop(order.name, None)
        if old is not None and old.order is not None:
            old.order.on_done(Conflict("A newer order for the same sequences replaced this one"))
        need = sum(blocks_for(len(tokens)) for tokens in order.sequences)
        if need > room - self.blocks:
            order.on_done(
                InsufficientMemory(f"The sequences need {need} blocks of KV cache, and {max(0, room - self.blocks)} are free")
            )
            return
        variant = order.variant
        held = list(old.parts) if old is not None and old.variant == variant else []
        now = time.monotonic()
        parts = [self._claim(held, tokens) for tokens in order.sequences]
        kept = self._kept[order.name] = _Entry(variant, parts, now + order.within_s, order, now + order.reply_within_s)
        self._conclude(kept)

    def _claim(self, held: list[PreparedSequence], tokens: tuple[int, ...]) -> PreparedSequence:
        """Take the sequence of `held` with the longest common prefix.

        It is cut to that prefix; the result is empty if there is none.
        """
        best = max(held, key=lambda p: common_prefix_length(p.tokens, tokens), default=None)
        if best is None:
            return PreparedSequence(tokens)
        shared = min(best.computed, common_prefix_length(best.tokens, tokens), len(tokens) - 1)
        if shared <= 0 or self.runner is None or (shared < best.computed and not self.runner.rewinds):
            return PreparedSequence(tokens)
        held.remove(best)
        return PreparedSequence(tokens, best.state, shared)

    def claim(self, name: str, variant: str, sequences: Sequence[tuple[int, ...]]) -> list[PreparedSequence]:
        """Hand the sequences kept as `name` to their request.

        One for each of its sequences, empty where none matches.
        """
        kept = self._kept.pop(name, None)
        if kept is None:
            return [PreparedSequence(tokens) for tokens in sequences]
        if kept.order is not None:
            kept.order.on_done(Conflict("The resumed request arrived before its sequences were computed"))
        held = kept.parts if kept.variant == variant else []
        return [self._claim(held, tokens) for tokens in sequences]

    def work(self, tokens: int, blocks: int) -> tuple[PreparedSequence, Row] | None:
        """The next row to compute; None if there is none, or no room.

        Args:
            tokens: Most tokens of the row.
            blocks: Blocks that it may take in addition.
        """
        for kept in self._kept.values():
            if kept.order is None:
                continue
            for part in kept.parts:
                count = min(tokens, part.remaining, (part.blocks + blocks) * BLOCK_TOKENS - part.computed)
                if count > 0 and self.runner is not None:
                    if part.state is None:
                        part.state = self.runner.new_state()
                    row = part.tokens[part.computed : part.computed + count]
                    return part, Row(part.state, part.computed, row, kept.order.adapter)
        return None

    def record_computed(self, part: PreparedSequence, row: Row) -> None:
        """Record that `row` of `part` was computed."""
        part.computed += len(row.tokens)
        for kept in list(self._kept.values()):
            if any(p is part for p in kept.parts):
                kept.done += len(row.tokens)
                self._conclude(kept)

    def _conclude(self, kept: _Entry) -> None:
        now = time.monotonic()
        if kept.order is not None and (not kept.left or (kept.done and now >= kept.reply_by)):
            order, kept.order = kept.order, None
            kept.expires = now + order.keep_s
            order.on_done(Computed(kept.done, kept.left))

    def discard_failed(self, part: PreparedSequence, error: ThawError) -> None:
        """Discard the entries of `part`, whose step failed."""
        for name in [n for n, k in self._kept.items() if any(p is part for p in k.parts)]:
            self._drop(name, error)

    def forget(self, name: str) -> None:
        """Discard an entry. Unknown names are ignored."""
        if name in self._kept:
            self._drop(name, NotFound("The prepared sequences were discarded"))

    def expire(self, now: float) -> None:
        """Discard entries that expired before `now`."""
        for name in [n for n, k in self._kept.items() if now >= k.expires]:
            self._drop(name, InsufficientMemory("Running requests left no time to compute the sequences within the deadline"))

    def preempt(self, blocks: int) -> int:
        """Discard at least `blocks` blocks, newest entries first.

        Returns:
            The number of blocks that are still missing.
        """
        while blocks > 0 and self._kept:
            name = next(reversed(self._kept))
            blocks -= self._kept[name].blocks
            self._drop(name, InsufficientMemory("Running requests needed the memory of the prepared sequences"))
        return max(0, blocks)

    def _drop(self, name: str, why: ThawError) -> None:
        kept = self._kept.pop(name)
        if kept.order is not None:
            kept.order.on_done(why)
