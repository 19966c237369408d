"""How many pages a KV cache borrows, and when it returns them (ADR 0056).

1. An engine keeps its floor of pages, which is booked.
2. It asks for what its sequences are known to need, and a margin, so that decoding rarely waits.
3. It returns pages that were not needed for `RETURN_AFTER_S`: a short lull costs no round trip.
4. When others need pages it returns them at once, and preempts sequences if it must.
5. If no sequence can run with the pages that it has, and there are no more, it returns all beyond
   its floor and asks again later: two such engines do not wait for each other's pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.engine.domain.step_planning import Limits, SequenceView, blocks_for

KV_FLOOR_BYTES = 32 * 1024 * 1024
"""Bytes of pages that an engine keeps from its start to its end."""
RETURN_AFTER_S = 2.0
_FIRST_BACKOFF_S, _BACKOFF_DOUBLES = 0.1, 5
_MARGIN = 8
"""The margin is one part in this many of the need, and at least a page."""


@dataclass(frozen=True)
class Lease:
    """Pages of one engine.

    Attributes:
        floor: Booked pages.
        ceiling: Most pages that the engine can use.
        block_bytes: Bytes of a block of tokens.
        page_bytes: Bytes of a page.
        held: Pages that the engine has.
        asked: Pages that it has asked for in all.
        is_answered: The loader has answered that.
        low_since: Since when fewer pages were needed than asked for, in monotonic seconds.
        spread: From 0 to 1, different for each engine: how long it waits by rule 5.
        stalls: How often rule 5 has applied since sequences last ran.
        retry_at: Until then it asks for its floor only, in monotonic seconds.
    """

    floor: int
    ceiling: int
    block_bytes: int
    page_bytes: int
    held: int = 0
    asked: int = 0
    is_answered: bool = True
    low_since: float | None = None
    spread: float = 0.0
    stalls: int = 0
    retry_at: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks that fit into the pages held."""
        return self.held * self.page_bytes // self.block_bytes

    def pages_for(self, blocks: int) -> int:
        return -(-blocks * self.block_bytes // self.page_bytes)


@dataclass(frozen=True)
class Adjustment:
    """The changed lease, and messages for the loader.

    Attributes:
        ask: The new demand; None: unchanged.
        give_back: Pages to return.
    """

    lease: Lease
    ask: int | None = None
    give_back: int = 0


def needed_blocks(running: Iterable[SequenceView], waiting: Iterable[SequenceView], limits: Limits) -> int:
    """Return the blocks with which all sequences that have a slot can run, one spare for each."""
    views = list(running)
    slots = max(0, limits.max_sequences - len(views))
    views += [view for view, _ in zip(waiting, range(slots), strict=False)]
    return sum(blocks_for(v.length) + 1 for v in views)


def adjust(lease: Lease, needed: int, used: int, now: float, *, is_stalled: bool = False) -> Adjustment:
    """Apply rules 1 to 3 and 5.

    Args:
        is_stalled: There are sequences, and none can run with the blocks of the lease.
        needed: Blocks that sequences need (`needed_blocks`).
        used: Blocks in use.
        now: Monotonic seconds.
    """
    if is_stalled and lease.is_answered and lease.held > lease.floor and now >= lease.retry_at:
        wait = _FIRST_BACKOFF_S * (1 + lease.spread) * 2 ** min(lease.stalls, _BACKOFF_DOUBLES)
        return _reduce(replace(lease, stalls=lease.stalls + 1, retry_at=now + wait), max(lease.floor, lease.pages_for(used)))
    if not is_stalled and used:
        lease = replace(lease, stalls=0, retry_at=0.0)
    need = lease.pages_for(needed) if now >= lease.retry_at else 0
    target = max(lease.floor, min(lease.ceiling, need + max(1, need // _MARGIN) if need else 0))
    if target > lease.asked:
        return Adjustment(replace(lease, asked=target, is_answered=False, low_since=None), ask=target)
    if target == lease.asked and lease.held <= target:
        return Adjustment(replace(lease, low_since=None))
    if lease.low_since is None:
        return Adjustment(replace(lease, low_since=now))
    if now - lease.low_since < RETURN_AFTER_S:
        return Adjustment(lease)
    return _reduce(lease, max(target, lease.pages_for(used)))


def shrink(lease: Lease, keep: int) -> Lease:
    """Apply rule 4: the lease after at most `keep` pages, or the floor, are left.

    The engine preempts what does not fit, and then returns the difference.
    """
    return replace(lease, held=min(lease.held, max(keep, lease.floor)))


def lent(lease: Lease, more: int, *, is_answer: bool) -> Lease:
    """Add pages that the engine has got."""
    return replace(lease, held=lease.held + more, is_answered=lease.is_answered or is_answer)


def _reduce(lease: Lease, target: int) -> Adjustment:
    give_back = max(0, lease.held - target)
    reduced = replace(lease, asked=target, is_answered=True, held=lease.held - give_back, low_since=None)
    return Adjustment(reduced, ask=target, give_back=give_back)


def next_adjustment(lease: Lease) -> float | None:
    """Return when `adjust` has something to do without an event, in monotonic seconds."""
    times = [lease.low_since + RETURN_AFTER_S] if lease.low_since is not None else []
    return min([*times, lease.retry_at] if lease.retry_at else times, default=None)
