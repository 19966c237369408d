"""Sequences prefilled for resumed requests (`PrepareResume`), by name.

They belong to the computing thread.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.engine.domain.background_prefill import common_prefix_length
from services.engine.domain.step_planning import BLOCK_TOKENS, blocks_for
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import Row, Runner
from shared.errors import Conflict, InsufficientMemory, NotFound, ThawError


@dataclass(frozen=True)
class Computed:
    """The progress of an order, in tokens.

    Attributes:
        tokens: Computed so far.
        left: Still to be computed.
        received: Not computed, because their keys and values came from another engine.
    """

    tokens: int
    left: int = 0
    received: int = 0


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
        on_accepted: Keys and values of other engines are stored before anything is computed, until
            `end_receiving`. Called on the computing thread with the order's number and the tokens
            that each sequence has.
        computes: The engine computes what it has not received. False: the resumed request does.
        cache_salt: Of the API key whose request may take the result; None: nothing is received.
        caused_by: The plan that needed the memory of the request; empty: none did. None: as of the
            last order of this name.
    """

    name: str
    sequences: tuple[tuple[int, ...], ...]
    adapter: LoraAdapter | None
    variant: str
    keep_s: float
    within_s: float
    on_done: Callable[[Outcome], None]
    reply_within_s: float = math.inf
    on_accepted: Callable[[int, tuple[int, ...]], None] | None = None
    computes: bool = True
    cache_salt: str | None = None
    caused_by: str | None = None


@dataclass
class PreparedSequence:
    """One sequence.

    Its last token is left to the request, which needs the logits after it.

    Attributes:
        computed: Number of tokens whose keys and values are complete.
        written: Number of tokens whose keys and values may be in memory.
        choice: Choice of a sequence that was retained.
        ends: Number of tokens of each layer, while they are received.
        caused_by: As in its order; None: it was not ordered.
    """

    tokens: tuple[int, ...]
    state: Any = None
    computed: int = 0
    written: int = 0
    choice: int = 0
    ends: list[int] = field(default_factory=list)
    caused_by: str | None = None

    @property
    def blocks(self) -> int:
        return blocks_for(max(self.computed, self.written))

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
    received: int = 0
    receiving: int | None = None
    """The number of the order whose keys and values are received."""
    cache_salt: str | None = None

    @property
    def blocks(self) -> int:
        return sum(p.blocks for p in self.parts)

    @property
    def caused_by(self) -> str | None:
        return self.parts[0].caused_by if self.parts else None

    @property
    def left(self) -> int:
        return sum(max(0, p.remaining) for p in self.parts)


@dataclass
class PreparedPrefixes:
    """Prepared sequences by name. Owned by the computing thread."""

    runner: Runner | None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
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
        """True if there are tokens to compute."""
        return any(k.order is not None and k.receiving is None for k in self._kept.values())

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
            if old is not None and not order.computes:
                self._kept[order.name] = old
            order.on_done(
                InsufficientMemory(f"The sequences need {need} blocks of KV cache, and {max(0, room - self.blocks)} are free")
            )
            return
        variant = order.variant
        held: list[PreparedSequence] = []
        cache_salt = order.cache_salt
        if old is not None and old.variant == variant and (cache_salt is None or old.cache_salt in (None, cache_salt)):
            held, cache_salt = list(old.parts), old.cache_salt if cache_salt is None else cache_salt
        now = time.monotonic()
        parts = [self._claim(held, tokens) for tokens in order.sequences]
        caused_by = order.caused_by if order.caused_by is not None or old is None else old.caused_by
        for part in parts:
            part.caused_by = caused_by
        kept = self._kept[order.name] = _Entry(variant, parts, now + order.within_s, order, now + order.reply_within_s)
        kept.cache_salt = cache_salt
        if order.on_accepted is not None:
            kept.receiving = next(self._numbers)
            order.on_accepted(kept.receiving, tuple(p.computed for p in parts))
        else:
            self._conclude(kept)

    def _find_receiving(self, number: int) -> _Entry | None:
        return next((k for k in self._kept.values() if k.receiving == number), None)

    def find_receiving(self, number: int, index: int) -> PreparedSequence | None:
        """Return a sequence of an order that still receives; None: it does not."""
        kept = self._find_receiving(number)
        return kept.parts[index] if kept is not None else None

    def record_received(self, number: int, index: int, end: int) -> None:
        """Record that a sequence of an order has the first `end` tokens in all layers."""
        if (kept := self._find_receiving(number)) is not None:
            kept.received += end - kept.parts[index].computed
            kept.parts[index].computed = end

    def end_receiving(self, number: int) -> None:
        """Compute the rest, if the order wants that. Numbers of dropped orders are ignored."""
        kept = self._find_receiving(number)
        if kept is None:
            return
        kept.receiving = None
        if kept.order is not None and not kept.order.computes:
            self._report(kept, kept.order, time.monotonic())
        else:
            self._conclude(kept)

    def retain(self, name: str, variant: str, parts: list[PreparedSequence], keep_s: float) -> None:
        """Keep the sequences of a request that continues at another engine, which reads them."""
        self._kept[name] = _Entry(variant, parts, time.monotonic() + keep_s)

    def find_retained(self, name: str) -> list[PreparedSequence]:
        """Return what `retain` has kept; nothing if it was dropped."""
        kept = self._kept.get(name)
        return kept.parts if kept is not None else []

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
        return PreparedSequence(tokens, best.state, shared, best.written)

    def claim(self, name: str, variant: str, sequences: Sequence[tuple[int, ...]], cache_salt: str = "") -> list[PreparedSequence]:
        """Hand the sequences kept as `name` to their request.

        One for each of its sequences, empty where none matches. Received keys and values go only to
        a request with their `cache_salt`.
        """
        kept = self._kept.pop(name, None)
        if kept is None:
            return [PreparedSequence(tokens) for tokens in sequences]
        if kept.order is not None:
            kept.order.on_done(Conflict("The resumed request arrived before its sequences were computed"))
        caused_by = kept.caused_by
        held = kept.parts if kept.variant == variant and kept.cache_salt in (None, cache_salt) else []
        claimed = [self._claim(held, tokens) for tokens in sequences]
        for part in claimed:
            part.caused_by = caused_by
        return claimed

    def work(self, tokens: int, blocks: int) -> tuple[PreparedSequence, Row] | None:
        """The next row to compute; None if there is none, or no room.

        Args:
            tokens: Most tokens of the row.
            blocks: Blocks that it may take in addition.
        """
        for kept in self._kept.values():
            if kept.order is None or kept.receiving is not None:
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
        if kept.order is not None and (not kept.left or (kept.done + kept.received and now >= kept.reply_by)):
            self._report(kept, kept.order, now)

    @staticmethod
    def _report(kept: _Entry, order: PrepareOrder, now: float) -> None:
        kept.order = None
        kept.expires = now + order.keep_s
        order.on_done(Computed(kept.done, kept.left, kept.received))

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

    def close(self, error: ThawError) -> None:
        """Discard all entries; orders that are not complete fail with `error`."""
        for name in list(self._kept):
            self._drop(name, error)

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
