"""Decide how many pages a KV cache borrows, and when it returns them (ADR 0056).

1. An engine keeps its floor of pages, which is booked.
2. The engine asks for the pages that its sequences are known to need and a margin, so that decoding
   rarely waits.
3. It returns pages that it has not needed for `RETURN_AFTER_S`: a short lull costs no round trip.
4. When others need pages it returns pages at once, and preempts sequences if it must.
5. If no sequence can run, or the oldest has been preempted `MAX_PREEMPTIONS` times, the engine asks
   for a turn. One engine of a device at a time has the turn, in the order of asking. The pages that
   its oldest sequence needs are then guaranteed like its floor, until that sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.engine.domain.step_planning import Limits, SequenceView, blocks_for

RETURN_AFTER_S = 2.0
_MARGIN = 8
"""The margin is one part in this many of the need, and at least a page."""


@dataclass(frozen=True)
class Turn:
    """A turn of one engine, asked for or granted.

    Attributes:
        number: Increases with each turn of the engine.
        key: Key of the sequence that needs the turn.
        pages: Pages that the sequence needs now.
        is_granted: True if the loader has granted the turn.
    """

    number: int
    key: int
    pages: int = 0
    is_granted: bool = False


@dataclass(frozen=True)
class Demand:
    """The pages that an engine asks the loader for.

    Attributes:
        pages: Total number of pages.
        turn: Number of the turn that the engine wants or has; 0: none.
        turn_pages: The part of `pages` that the sequence of the turn needs.
    """

    pages: int
    turn: int = 0
    turn_pages: int = 0


@dataclass(frozen=True)
class Lease:
    """Pages of one engine.

    Attributes:
        floor: Booked pages.
        ceiling: The largest number of pages that the engine can use.
        block_bytes: Bytes of a block of tokens.
        page_bytes: Bytes of a page.
        held: Pages that the engine has.
        asked: The engine's latest demand.
        is_answered: True if the loader has answered the latest demand.
        low_since: Time since which the engine needs fewer pages than it asked for, in monotonic
            seconds; None: it needs all.
        turn: The turn that the engine wants or has.
        turns: Number of turns that the engine has asked for so far.
    """

    floor: int
    ceiling: int
    block_bytes: int
    page_bytes: int
    held: int = 0
    asked: Demand = Demand(0)
    is_answered: bool = True
    low_since: float | None = None
    turn: Turn | None = None
    turns: int = 0

    @property
    def blocks(self) -> int:
        """Blocks that fit into the pages held."""
        return self.held * self.page_bytes // self.block_bytes

    @property
    def floor_blocks(self) -> int:
        """Blocks that fit into the floor."""
        return self.floor * self.page_bytes // self.block_bytes

    @property
    def protected(self) -> int | None:
        """Key of the sequence with the granted turn; None: there is none."""
        return self.turn.key if self.turn is not None and self.turn.is_granted else None

    def pages_for(self, blocks: int) -> int:
        return -(-blocks * self.block_bytes // self.page_bytes)


@dataclass(frozen=True)
class Need:
    """The blocks that an engine needs at one moment.

    Attributes:
        blocks: All blocks (`needed_blocks`, and `other_blocks`).
        used_blocks: Blocks in use.
        other_blocks: The part of `blocks` for LoRA adapters, without which no sequence runs.
        oldest: The oldest sequence, running or waiting.
        is_stalled: True if there are sequences and none can run.
    """

    blocks: int
    used_blocks: int
    other_blocks: int = 0
    oldest: SequenceView | None = None
    is_stalled: bool = False


@dataclass(frozen=True)
class Adjustment:
    """The changed lease, and messages for the loader.

    Attributes:
        ask: The new demand; None: the demand has not changed.
        give_back: Pages to return.
    """

    lease: Lease
    ask: Demand | None = None
    give_back: int = 0


def needed_blocks(running: Iterable[SequenceView], waiting: Iterable[SequenceView], limits: Limits) -> int:
    """Return the blocks that let all sequences with a slot run, and one spare block for each."""
    views = list(running)
    slots = max(0, limits.max_sequences - len(views))
    views += [view for view, _ in zip(waiting, range(slots), strict=False)]
    return sum(blocks_for(v.length) + 1 for v in views)


def adjust(lease: Lease, need: Need, now: float) -> Adjustment:
    """Apply rules 1 to 3 and 5.

    Args:
        lease: The lease after the last event.
        need: The blocks that the engine needs now.
        now: Monotonic seconds.
    """
    wanted = lease.pages_for(need.blocks)
    wanted += max(1, wanted // _MARGIN) if wanted else 0
    target = max(lease.floor, min(lease.ceiling, wanted))
    lease = _with_turn(lease, need, has_asked=target <= lease.asked.pages)
    turn = lease.turn
    target = max(target, turn.pages) if turn is not None else target
    ask = Demand(target, turn.number, turn.pages) if turn is not None else Demand(target)
    if target > lease.asked.pages:
        return Adjustment(replace(lease, asked=ask, is_answered=False, low_since=None), ask=ask)
    if target == lease.asked.pages and lease.held <= target:
        lease = replace(lease, low_since=None)
    elif lease.low_since is None:
        lease = replace(lease, low_since=now)
    elif now - lease.low_since >= RETURN_AFTER_S:
        keep = max(target, lease.pages_for(need.used_blocks))
        give_back = max(0, lease.held - keep)
        ask = replace(ask, pages=keep)
        return Adjustment(replace(lease, asked=ask, is_answered=True, held=lease.held - give_back, low_since=None), ask, give_back)
    ask = replace(ask, pages=lease.asked.pages)
    if ask == lease.asked:
        return Adjustment(lease)
    return Adjustment(replace(lease, asked=ask, is_answered=False), ask=ask)


def _with_turn(lease: Lease, need: Need, *, has_asked: bool) -> Lease:
    """Apply rule 5: end the turn whose sequence has ended, and ask for one."""
    turn, oldest = lease.turn, need.oldest
    if turn is not None and (oldest is None or oldest.key != turn.key):
        turn = None
    if oldest is None:
        return replace(lease, turn=None)
    is_refused = has_asked and lease.is_answered
    if turn is None and ((need.is_stalled and is_refused) or _is_at_risk(lease, need, oldest)):
        turn = Turn(lease.turns + 1, oldest.key)
        lease = replace(lease, turns=turn.number)
    if turn is not None:
        pages = lease.pages_for(blocks_for(oldest.length) + 1 + need.other_blocks)
        turn = replace(turn, pages=max(turn.pages, min(lease.ceiling, pages)))
    return replace(lease, turn=turn)


def _is_at_risk(lease: Lease, need: Need, oldest: SequenceView) -> bool:
    """True if the sequence must not be preempted again and the floor does not suffice for it."""
    fits = blocks_for(oldest.greatest_length) + need.other_blocks <= lease.floor_blocks
    return oldest.is_aged and not (oldest.greatest_length and fits)


def shrink(lease: Lease, keep: int) -> Lease:
    """Apply rule 4: reduce the lease to `keep` pages, or to the floor if that is more.

    The engine preempts the sequences that no longer fit, and then returns the difference.
    """
    return replace(lease, held=min(lease.held, max(keep, lease.floor)))


def add_lent(lease: Lease, more: int, *, is_answer: bool, turn: int | None = 0) -> Lease:
    """Add pages that the loader has lent.

    Args:
        lease: The lease before.
        more: The number of additional pages.
        is_answer: True if the loader has received the latest demand.
        turn: Number of the granted turn; None: the loader does not support turns, and each engine
            proceeds as if it had one.
    """
    own = lease.turn
    if own is not None:
        own = replace(own, is_granted=turn is None or turn == own.number)
    return replace(lease, held=lease.held + more, is_answered=lease.is_answered or is_answer, turn=own)


def next_adjustment(lease: Lease) -> float | None:
    """Return the time of the next `adjust` without an event, in monotonic seconds; None: never."""
    return lease.low_since + RETURN_AFTER_S if lease.low_since is not None else None
