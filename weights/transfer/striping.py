"""Read one load from several sources at once, each over its own link (ADR 0089).

`stripe_plan.py` decides who reads what. A piece is published once, by the attempt that read it
first, and only when no other attempt writes to the same memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from weights.tiers.port import Cancelled
from weights.transfer import stripe_plan as plans
from weights.transfer.link import Link, Taken, numbers
from weights.transfer.pieces import Piece
from weights.transfer.stripe_plan import Attempt, StripePlan, StripeSource

log = logging.getLogger(__name__)
_TICK_S = 0.05
"""The end of a load, and a reserve, depend on the time that reads have taken."""


class SourceFailed(Exception):
    """A source failed, and others may have the same bytes.

    Attributes:
        error: The error of the source.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Fetched:
    """A piece that was read.

    Attributes:
        copy: The bytes; None: they are in the segment.
        from_source: It was read from the source, not from this host's disk.
    """

    copy: memoryview | None
    from_source: bool = True


class StripeReader(Protocol):
    """Reads pieces for several sources, from several threads."""

    def fetch(self, source: int, piece: Piece, *, is_direct: bool, cancelled: threading.Event) -> Fetched:
        """Read a piece into the segment (`is_direct`), or into memory of its own.

        Raises `SourceFailed`, `Cancelled`, or an error that ends the load.
        """
        ...

    def keep(self, piece: Piece, fetched: Fetched) -> None:
        """Have the piece in the segment, and verify and cache it. Called once for each piece."""
        ...


class StripedTransfer:
    """A load that several sources have."""

    def __init__(
        self,
        sources: Sequence[StripeSource],
        pieces: Sequence[Piece],
        reader: StripeReader,
        publish: Callable[[Piece], None],
        *,
        background: bool = False,
        cancelled: threading.Event | None = None,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plan the load.

        Args:
            sources: The sources.
            pieces: The pieces to read.
            reader: Reads and keeps pieces.
            publish: Called once with each piece, from the links' threads.
            background: Loads of requests go first.
            cancelled: Set to cancel the load.
            model: Name of the model, for reports; empty: not known.
            clock: Monotonic seconds.
        """
        self._plan = plans.make_plan(sources, pieces, clock())
        self._reader, self._publish, self._clock = reader, publish, clock
        self._cancelled = cancelled or threading.Event()
        self._changed = threading.Condition()
        self._stops: dict[int, _Stop] = {}
        self._error: BaseException | None = None
        self._source_error: Exception | None = None
        self._shares = [_Share(self, source, background, model) for source in range(len(sources))]
        self._links: Sequence[Link] = ()

    @property
    def plan(self) -> StripePlan:
        """The present state, for reports."""
        return self._plan

    def run(self, links: Sequence[Link]) -> None:
        """Read every piece over `links`, one for each source.

        The function returns or raises only when no thread touches the segment any more.

        Raises:
            Cancelled: The load was cancelled. The last source's error is raised, too.
        """
        assert len(links) == len(self._shares)
        self._links = links
        try:
            for source, share in enumerate(self._shares):
                with self._without_thread(source):
                    links[source].submit(share)
            self._wait()
        finally:
            with self._changed:
                self._end(None)
                self._changed.wait_for(self._is_untouched)
            self._refresh()
        if self._error is not None:
            raise self._error

    def raise_priority(self) -> None:
        """Give the load a request's priority: one waits for it now."""
        for share in self._shares:
            share.background = False
        for link, share in zip(self._links, self._shares, strict=False):
            link.raise_priority(share)

    def _wait(self) -> None:
        while True:
            with self._changed:
                if not self._is_over():
                    self._changed.wait(_TICK_S)
                if self._cancelled.is_set():
                    self._end(Cancelled())
                elif self._plan.is_stuck:
                    self._end(self._source_error)
                if self._is_over():
                    return
            self._refresh()

    def _refresh(self) -> None:
        """Ask each link to look again. Not under the lock: links ask this object under theirs."""
        for source, share in enumerate(self._shares):
            with self._without_thread(source):
                self._links[source].refresh(share)

    @contextmanager
    def _without_thread(self, source: int) -> Iterator[None]:
        """Leave a source out if its link can start no thread: others read its pieces."""
        try:
            yield
        except RuntimeError as e:
            name = self._plan.sources[source].name
            log.warning("failed to start a thread of a link; other sources read", extra={"link": name, "error": str(e)})
            with self._changed:
                self._source_error = e
                self._change(plans.record_unusable(self._plan, source))

    # -- under the lock ----------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._error is not None or self._plan.is_complete

    def _is_untouched(self) -> bool:
        """True if no thread writes to the segment, or is about to."""
        return not any(a.is_direct or a.is_won for a in self._plan.attempts)

    def _end(self, error: BaseException | None) -> None:
        if not self._plan.is_complete:
            self._error = self._error or error
        self._change(plans.record_over(self._plan))

    def _change(self, plan: StripePlan) -> None:
        self._plan = plan
        for attempt in plan.attempts:
            if attempt.is_lost:
                self._stops[attempt.number].set()
        self._changed.notify_all()

    # -- for the links -----------------------------------------------------------------------------

    def is_exhausted(self, source: int) -> bool:
        with self._changed:
            return self._is_over() or self._plan.sources[source].is_out

    def list_left(self, source: int) -> tuple[int, int]:
        with self._changed:
            return plans.list_left(self._plan, source, self._clock())

    def take(self, source: int) -> Taken | None:
        with self._changed:
            self._plan, attempt = plans.claim(self._plan, source, self._clock())
            if attempt is None:
                return None
            self._stops[attempt.number] = _Stop(self._cancelled)
            return Taken(attempt.piece.length, lambda: self._read(attempt))

    def abandon(self, error: BaseException) -> None:
        with self._changed:
            self._end(error)

    # -- in the links' threads ---------------------------------------------------------------------

    def _read(self, attempt: Attempt) -> int:
        """Make an attempt; returns the bytes that count for the link's speed."""
        try:
            return self._fetch(attempt)
        except SourceFailed as e:
            with self._changed:
                self._source_error = e.error
                self._change(plans.record_failed(self._plan, attempt.number))
        except Cancelled as e:
            with self._changed:
                is_lost = plans.get_attempt(self._plan, attempt.number).is_lost
                self._change(plans.record_ended(self._plan, attempt.number))
                if not is_lost:
                    self._end(e)
        except BaseException as e:  # the thread's boundary: the load's waiter needs the error
            with self._changed:
                self._change(plans.record_ended(self._plan, attempt.number))
                self._end(e)
        finally:
            with self._changed:
                del self._stops[attempt.number]
        return 0

    def _fetch(self, attempt: Attempt) -> int:
        fetched = self._reader.fetch(
            attempt.source, attempt.piece, is_direct=attempt.is_direct, cancelled=self._stops[attempt.number]
        )
        with self._changed:
            plan, is_first = plans.record_read(self._plan, attempt.number, self._clock(), from_source=fetched.from_source)
            self._change(plan)
            if not is_first:
                return 0
            self._changed.wait_for(lambda: plans.is_alone(self._plan, attempt))
        self._reader.keep(attempt.piece, fetched)
        self._publish(attempt.piece)
        with self._changed:
            self._change(plans.record_published(self._plan, attempt.number))
        return attempt.piece.length if fetched.from_source else 0


class _Share:
    """The part of a striped load that one link reads (`LinkLoad`)."""

    def __init__(self, transfer: StripedTransfer, source: int, background: bool, model: str) -> None:
        self._transfer, self._source, self.background, self.model = transfer, source, background, model
        self.number, self.running = next(numbers), 0

    @property
    def is_exhausted(self) -> bool:
        return self._transfer.is_exhausted(self._source)

    def list_left(self) -> tuple[int, int]:
        return self._transfer.list_left(self._source)

    def take(self) -> Taken | None:
        return self._transfer.take(self._source)

    def abandon(self, error: BaseException) -> None:
        self._transfer.abandon(error)

    def on_over(self) -> None:
        """No-op: the load is over when its pieces are published."""


class _Stop(threading.Event):
    """Set if an attempt is lost, or its load is cancelled."""

    def __init__(self, cancelled: threading.Event) -> None:
        super().__init__()
        self._load_cancelled = cancelled

    def is_set(self) -> bool:
        return super().is_set() or self._load_cancelled.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in slices: the load's event does not wake this one's waiters."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            super().wait(left)
        return True
