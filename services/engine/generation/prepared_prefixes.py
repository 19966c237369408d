"""Keys and values computed ahead (`PrepareResume`), kept by the computing thread under the name that a resumed request will bring."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.engine.domain.background_prefill import common
from services.engine.domain.step_planning import blocks_for
from services.engine.generation.lora_layers import Adapter
from services.engine.generation.runner import Row, Runner
from shared.errors import Conflict, EngineFailed, InsufficientMemory, NotFound, ThawError


@dataclass(frozen=True)
class Computed:
    """Tokens that an order has computed, and those of its sequences that are not yet."""

    tokens: int
    left: int = 0


Outcome = Computed | ThawError


@dataclass(frozen=True)
class Prepare:
    """Compute `sequences` and keep them for `keep_s` from then on, as `name`. After `answer_s` it ends with what was computed, if that is
    anything; it is given up after `within_s`. `variant`: what besides the tokens decides about keys and values (the adapter's revision).
    `told` is called on the computing thread."""

    name: str
    sequences: tuple[tuple[int, ...], ...]
    adapter: Adapter | None
    variant: str
    keep_s: float
    within_s: float
    told: Callable[[Outcome], None]
    answer_s: float = math.inf


@dataclass
class Part:
    """One sequence. Its last token is left to the request, whose first logits it gives."""

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
class _Kept:
    variant: str
    parts: list[Part]
    expires: float
    order: Prepare | None = None
    answer_by: float = math.inf
    done: int = 0

    @property
    def blocks(self) -> int:
        return sum(p.blocks for p in self.parts)

    @property
    def left(self) -> int:
        return sum(max(0, p.remaining) for p in self.parts)


@dataclass
class Ahead:
    """Owned by the computing thread. `rewinds`: a state can be used from an earlier token on."""

    runner: Runner | None
    _kept: dict[str, _Kept] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        return sum(k.blocks for k in self._kept.values())

    @property
    def busy(self) -> bool:
        return any(k.order is not None for k in self._kept.values())

    def next_expiry(self) -> float | None:
        """In seconds of the monotonic clock."""
        return min((k.expires for k in self._kept.values()), default=None)

    def order(self, order: Prepare, room: int) -> None:
        """Take an order on; `room`: blocks that requests leave. Refused (`told`) if it has none there."""
        old = self._kept.pop(order.name, None)
        if old is not None and old.order is not None:
            old.order.told(Conflict("the same was asked for again"))
        need = sum(blocks_for(len(tokens)) for tokens in order.sequences)
        if need > room - self.blocks:
            order.told(InsufficientMemory(f"{need} blocks of KV cache are needed, and {max(0, room - self.blocks)} are free"))
            return
        variant = order.variant
        held = list(old.parts) if old is not None and old.variant == variant else []
        now = time.monotonic()
        parts = [self._claim(held, tokens) for tokens in order.sequences]
        kept = self._kept[order.name] = _Kept(variant, parts, now + order.within_s, order, now + order.answer_s)
        self._conclude(kept)

    def _claim(self, held: list[Part], tokens: tuple[int, ...]) -> Part:
        """The part of `held` that has most of `tokens`, cut to what they share; a new one if that is nothing."""
        best = max(held, key=lambda p: common(p.tokens, tokens), default=None)
        if best is None:
            return Part(tokens)
        shared = min(best.computed, common(best.tokens, tokens), len(tokens) - 1)
        if shared <= 0 or self.runner is None or (shared < best.computed and not self.runner.rewinds):
            return Part(tokens)
        held.remove(best)
        return Part(tokens, best.state, shared)

    def claim(self, name: str, variant: str, sequences: Sequence[tuple[int, ...]]) -> list[Part]:
        """Give what is kept as `name` to the request that brings it: one part for each of its sequences, empty where nothing fits."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return [Part(tokens) for tokens in sequences]
        if kept.order is not None:
            kept.order.told(Conflict("the request has come"))
        held = kept.parts if kept.variant == variant else []
        return [self._claim(held, tokens) for tokens in sequences]

    def work(self, tokens: int) -> tuple[Part, Row] | None:
        """At most so many tokens to compute next."""
        for kept in self._kept.values():
            if kept.order is None:
                continue
            for part in kept.parts:
                if part.remaining > 0 and tokens > 0 and self.runner is not None:
                    if part.state is None:
                        part.state = self.runner.new_state()
                    row = part.tokens[part.computed : part.computed + min(tokens, part.remaining)]
                    return part, Row(part.state, part.computed, row, kept.order.adapter)
        return None

    def computed(self, part: Part, row: Row) -> None:
        part.computed += len(row.tokens)
        for kept in list(self._kept.values()):
            if any(p is part for p in kept.parts):
                kept.done += len(row.tokens)
                self._conclude(kept)

    def _conclude(self, kept: _Kept) -> None:
        now = time.monotonic()
        if kept.order is not None and (not kept.left or (kept.done and now >= kept.answer_by)):
            order, kept.order = kept.order, None
            kept.expires = now + order.keep_s
            order.told(Computed(kept.done, kept.left))

    def failed(self, part: Part, error: EngineFailed) -> None:
        """A step over `part` failed: nothing of it can be trusted."""
        for name in [n for n, k in self._kept.items() if any(p is part for p in k.parts)]:
            self._drop(name, error)

    def forget(self, name: str) -> None:
        """Harmless if there is none."""
        if name in self._kept:
            self._drop(name, NotFound("it was forgotten"))

    def expire(self, now: float) -> None:
        for name in [n for n, k in self._kept.items() if now >= k.expires]:
            self._drop(name, InsufficientMemory("it could not be computed in time behind what runs here"))

    def give_way(self, blocks: int) -> int:
        """Let go of at least so many blocks, the newest first; how many are still missing."""
        while blocks > 0 and self._kept:
            name = next(reversed(self._kept))
            blocks -= self._kept[name].blocks
            self._drop(name, InsufficientMemory("its keys and values gave way to requests that run here"))
        return max(0, blocks)

    def _drop(self, name: str, why: ThawError) -> None:
        kept = self._kept.pop(name)
        if kept.order is not None:
            kept.order.told(why)
