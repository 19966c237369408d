"""Decide which source reads which piece of a load with several sources (ADR 0089).

The module has values only. Sources take pieces one by one, so each gets as many as its speed
allows. At the end, an idle source reads a piece again that is in flight at a slower one; the first
complete read counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weights.transfer.pieces import Piece

MOST_COPIES = 4
"""Attempts at once that read into memory of their own, a piece each."""
RESERVE_AFTER_S = 3.0
"""Seconds without a complete piece after which a reserve takes part."""
_PIECES_EACH = 16
_GAIN = 1.5
"""A piece is read again only if the other source is expected to need this many times as long."""


@dataclass(frozen=True)
class StripeSource:
    """A source of the load.

    Attributes:
        name: Name of its link.
        most: Pieces that it reads at once.
        is_reserve: It reads nothing while the other sources make progress.
        is_out: It failed, and reads nothing more.
        read_bytes: Bytes of the pieces that count.
        seconds_per_byte: Duration of its latest pieces by their length, at least that of a read
            that another source overtook; None: it has read none.
    """

    name: str
    most: int
    is_reserve: bool = False
    is_out: bool = False
    read_bytes: int = 0
    seconds_per_byte: float | None = None


@dataclass(frozen=True)
class Attempt:
    """One read of a piece by one source.

    Attributes:
        since: Monotonic seconds of its beginning.
        is_direct: It reads into the segment; otherwise into memory of its own.
        is_lost: Another attempt read the piece first, or the source is out. It ends soon.
        is_won: It read the piece first. The piece is not published yet.
    """

    number: int
    source: int
    piece: Piece
    since: float
    is_direct: bool
    is_lost: bool = False
    is_won: bool = False

    @property
    def is_reading(self) -> bool:
        return not self.is_lost and not self.is_won


@dataclass(frozen=True)
class StripePlan:
    """A load's sources, pieces and attempts.

    Attributes:
        pieces: In the order to read them.
        begun: Number of the `pieces` that an attempt was made for.
        returned: Begun pieces that no attempt reads now. They are read next.
        left_bytes: Bytes of the `pieces` after those.
        published: Number of published pieces.
        progress_at: Monotonic seconds at which the latest piece was read.
    """

    sources: tuple[StripeSource, ...]
    pieces: tuple[Piece, ...]
    begun: int = 0
    returned: tuple[Piece, ...] = ()
    left_bytes: int = 0
    attempts: tuple[Attempt, ...] = ()
    published: int = 0
    attempts_made: int = 0
    progress_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.published == len(self.pieces)

    @property
    def is_stuck(self) -> bool:
        """True if pieces are left and no source."""
        return not self.is_complete and all(s.is_out for s in self.sources) and not any(a.is_won for a in self.attempts)

    @property
    def has_pending(self) -> bool:
        """True if no attempt reads some piece yet."""
        return bool(self.returned) or self.begun < len(self.pieces)


def claim(plan: StripePlan, source: int, now: float) -> tuple[StripePlan, Attempt | None]:
    """Return the next attempt of `source`, which is idle; None if it has nothing to read."""
    piece = find_piece(plan, source, now)
    if piece is None:
        return plan, None
    attempt = Attempt(plan.attempts_made, source, piece, now, not _is_written(plan, piece))
    if piece in plan.returned:
        plan = replace(plan, returned=tuple(p for p in plan.returned if p != piece))
    elif plan.begun < len(plan.pieces) and piece == plan.pieces[plan.begun]:
        plan = replace(plan, begun=plan.begun + 1, left_bytes=plan.left_bytes - piece.length)
    plan = _change_source(plan, source, is_reserve=False)
    return replace(plan, attempts=(*plan.attempts, attempt), attempts_made=plan.attempts_made + 1), attempt


def find_piece(plan: StripePlan, source: int, now: float) -> Piece | None:
    """Return the piece that `source` reads next.

    1. The source is out, reads as many pieces as it may, or is a reserve that is not needed: none.
    2. A returned piece, or the next one that was never begun.
    3. Otherwise the piece that its present sources are expected to need the longest for, if this
       source is expected to be clearly faster.
    """
    # 1
    own = plan.sources[source]
    if own.is_out or sum(a.source == source for a in plan.attempts) >= own.most or not _takes_part(plan, source, now):
        return None
    # 2
    has_memory = sum(not a.is_direct for a in plan.attempts) < MOST_COPIES
    found = next((p for p in plan.returned if has_memory or not _is_written(plan, p)), None)
    if found is not None:
        return found
    if plan.begun < len(plan.pieces):
        return plan.pieces[plan.begun]
    # 3
    remaining_s: dict[Piece, float] = {}
    for attempt in plan.attempts:
        if attempt.is_reading:
            seconds = 0.0 if attempt.source == source else _remaining_s(plan, attempt, now)
            remaining_s[attempt.piece] = min(seconds, remaining_s.get(attempt.piece, seconds))
    if not remaining_s or not has_memory:
        return None
    slowest = max(remaining_s, key=remaining_s.__getitem__)
    own_s = RESERVE_AFTER_S if own.seconds_per_byte is None else own.seconds_per_byte * slowest.length
    return slowest if remaining_s[slowest] > _GAIN * own_s else None


def list_left(plan: StripePlan, source: int, now: float) -> tuple[int, int]:
    """Return how many pieces `source` may begin now, and its expected share of the bytes left."""
    own = plan.sources[source]
    pending = len(plan.returned) + len(plan.pieces) - plan.begun
    nbytes = 0
    if not own.is_out and _takes_part(plan, source, now):
        # Each source counts as if it had read one more piece: nothing is known at first.
        one = max((p.length for p in plan.pieces[:1]), default=0)
        shares = [s.read_bytes + one for i, s in enumerate(plan.sources) if not s.is_out and _takes_part(plan, i, now)]
        left = plan.left_bytes + sum(p.length for p in plan.returned)
        nbytes = left * (own.read_bytes + one) // max(1, sum(shares))
    free = own.most - sum(a.source == source for a in plan.attempts)
    return (max(1, min(pending, free)) if find_piece(plan, source, now) is not None else 0), nbytes


def record_read(plan: StripePlan, number: int, now: float, *, from_source: bool = True) -> tuple[StripePlan, bool]:
    """Record that an attempt has read its piece.

    Args:
        plan: The plan.
        number: Of the attempt.
        now: Monotonic seconds.
        from_source: False: the piece was on this host's disk, which says nothing of the source.

    Returns:
        The plan, and whether the attempt is the first to read this piece. If so, `record_published`
        follows; otherwise the attempt has ended.
    """
    attempt = get_attempt(plan, number)
    if attempt.is_lost:
        return record_ended(plan, number), False
    if from_source:
        source, length = plan.sources[attempt.source], attempt.piece.length
        pace, before = (now - attempt.since) / max(1, length), source.seconds_per_byte
        plan = _change_source(
            plan,
            attempt.source,
            read_bytes=source.read_bytes + length,
            seconds_per_byte=pace if before is None else (before + pace) / 2,
        )
    attempts = tuple(
        replace(a, is_won=True) if a is attempt else replace(a, is_lost=True) if a.piece == attempt.piece else a
        for a in plan.attempts
    )
    for overtaken in (a for a in plan.attempts if a.piece == attempt.piece and a is not attempt and a.is_reading):
        # It reads no other's piece again with the speed that it had before it stalled.
        pace, before = (now - overtaken.since) / max(1, overtaken.piece.length), plan.sources[overtaken.source].seconds_per_byte
        plan = _change_source(plan, overtaken.source, seconds_per_byte=max(pace, before or 0.0))
    return replace(plan, attempts=attempts, progress_at=now), True


def record_published(plan: StripePlan, number: int) -> StripePlan:
    """Record that the piece of an attempt that was the first is published."""
    assert get_attempt(plan, number).is_won
    return replace(record_ended(plan, number), published=plan.published + 1)


def record_ended(plan: StripePlan, number: int) -> StripePlan:
    """Record that an attempt touches no memory any more."""
    return replace(plan, attempts=tuple(a for a in plan.attempts if a.number != number))


def record_failed(plan: StripePlan, number: int) -> StripePlan:
    """Record that the source failed in an attempt.

    The source is left out, and other sources read its pieces. An attempt that was lost before
    changes nothing: its connection may have been cut for that reason.
    """
    attempt = get_attempt(plan, number)
    plan = record_ended(plan, number)
    if attempt.is_lost:
        return plan
    gone = [attempt, *(a for a in plan.attempts if a.source == attempt.source and a.is_reading)]
    attempts = tuple(replace(a, is_lost=True) if a in gone else a for a in plan.attempts)
    read_elsewhere = {a.piece for a in attempts if not a.is_lost}
    returned = tuple(a.piece for a in gone if a.piece not in read_elsewhere)
    plan = replace(plan, attempts=attempts, returned=(*plan.returned, *returned))
    return _change_source(plan, attempt.source, is_out=True)


def record_unusable(plan: StripePlan, source: int) -> StripePlan:
    """Record that nothing can read from the source any more. Its attempts continue."""
    return _change_source(plan, source, is_out=True)


def record_over(plan: StripePlan) -> StripePlan:
    """Record that the load is over: no source begins anything, and attempts end soon."""
    sources = tuple(replace(s, is_out=True) for s in plan.sources)
    return replace(plan, sources=sources, attempts=tuple(a if a.is_won else replace(a, is_lost=True) for a in plan.attempts))


def get_attempt(plan: StripePlan, number: int) -> Attempt:
    return next(a for a in plan.attempts if a.number == number)


def is_alone(plan: StripePlan, attempt: Attempt) -> bool:
    """True if no other attempt writes to the segment where this one's piece belongs."""
    return not any(a.is_direct and a.piece == attempt.piece and a.number != attempt.number for a in plan.attempts)


def piece_bytes(total_bytes: int, sources: int, most: int, least: int) -> int:
    """Return the length of the pieces of a load: several for each source, within the limits.

    Args:
        total_bytes: Of the load.
        sources: Their number.
        most: Longest piece.
        least: Shortest piece; a power of two divides `most` by it.
    """
    length = most
    while length > least and length * sources * _PIECES_EACH > total_bytes:
        length //= 2
    return length


def make_plan(sources: Sequence[StripeSource], pieces: Sequence[Piece], now: float) -> StripePlan:
    return StripePlan(tuple(sources), tuple(pieces), left_bytes=sum(p.length for p in pieces), progress_at=now)


def _takes_part(plan: StripePlan, source: int, now: float) -> bool:
    """True unless the source is a reserve, and others make progress."""
    if not plan.sources[source].is_reserve:
        return True
    if all(s.is_out or s.is_reserve for s in plan.sources):
        return True
    reading = [a.since for a in plan.attempts if a.is_reading]
    return bool(reading) and now - max(plan.progress_at, min(reading)) >= RESERVE_AFTER_S


def _is_written(plan: StripePlan, piece: Piece) -> bool:
    """True if an attempt writes this piece to the segment, or is about to end doing so."""
    return any(a.is_direct and a.piece == piece for a in plan.attempts)


def _remaining_s(plan: StripePlan, attempt: Attempt, now: float) -> float:
    """Expected seconds until an attempt ends.

    One that takes longer than expected is taken to be half through.
    """
    elapsed, pace = now - attempt.since, plan.sources[attempt.source].seconds_per_byte
    whole = 0.0 if pace is None else pace * attempt.piece.length
    return whole - elapsed if elapsed < whole else elapsed


def _change_source(plan: StripePlan, source: int, **changes: object) -> StripePlan:
    changed = replace(plan.sources[source], **changes)  # type: ignore[arg-type]  # fields of StripeSource
    return replace(plan, sources=(*plan.sources[:source], changed, *plan.sources[source + 1 :]))
