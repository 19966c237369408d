"""Striped loads over real links, from sources that read, fail, hang, or write until they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InsufficientMemory, Unavailable
from tests.support.examples import examples
from tests.support.launcher import until
from weights.tiers.port import Cancelled
from weights.transfer.link import Link
from weights.transfer.pieces import Piece
from weights.transfer.stripe_plan import StripeSource
from weights.transfer.striping import Fetched, SourceFailed, StripedTransfer

LENGTH = 8
GARBAGE = b"\xff" * LENGTH


def pieces(count: int) -> tuple[Piece, ...]:
    return tuple(Piece(i, 0, i * LENGTH, LENGTH, i * LENGTH) for i in range(count))


def content(piece: Piece) -> bytes:
    return bytes([piece.index + 1]) * LENGTH


Outcome = Callable[[int, Piece, threading.Event], None]
"""Runs before a source has read a piece; it may raise."""


class Segment:
    """Memory that is filled, and a reader of it (`StripeReader`)."""

    def __init__(self, count: int, outcome: Outcome) -> None:
        self.data, self.outcome = bytearray(count * LENGTH), outcome
        self.published: list[int] = []
        self.kept: list[int] = []
        self.copied: list[int] = []
        self._writing: set[int] = set()

    def fetch(self, source: int, piece: Piece, *, is_direct: bool, cancelled: threading.Event) -> Fetched:
        if not is_direct:
            self.outcome(source, piece, cancelled)
            return Fetched(memoryview(content(piece)))
        assert piece.index not in self._writing
        self._writing.add(piece.index)
        try:
            self._write(piece, GARBAGE)
            self.outcome(source, piece, cancelled)
            self._write(piece, content(piece))
            return Fetched(None)
        except BaseException:
            self._write(piece, GARBAGE)
            raise
        finally:
            self._writing.remove(piece.index)

    def keep(self, piece: Piece, fetched: Fetched) -> None:
        assert piece.index not in self._writing
        if fetched.copy is not None:
            self._write(piece, bytes(fetched.copy))
            self.copied.append(piece.index)
        self.kept.append(piece.index)

    def publish(self, piece: Piece) -> None:
        assert self.data[piece.target : piece.target + LENGTH] == content(piece)
        self.published.append(piece.index)

    def _write(self, piece: Piece, data: bytes) -> None:
        self.data[piece.target : piece.target + LENGTH] = data


@contextmanager
def links(count: int) -> Iterator[list[Link]]:
    found = [Link(f"link{i}", 2) for i in range(count)]
    try:
        yield found
    finally:
        for link in found:
            link.close()


def transfer(segment: Segment, count: int, *sources: StripeSource, cancelled: threading.Event | None = None) -> StripedTransfer:
    return StripedTransfer(sources, pieces(count), segment, segment.publish, cancelled=cancelled)


def source(number: int, *, is_reserve: bool = False) -> StripeSource:
    return StripeSource(f"link{number}", 2, is_reserve=is_reserve)


def read(source: int, piece: Piece, cancelled: threading.Event) -> None:
    """Read at once."""


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 8),
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 7)), st.sampled_from(["fail", "hang"])),
)
def test_each_piece_is_published_once_and_is_right(sources: int, count: int, faults: dict[tuple[int, int], str]) -> None:
    lock, hangs_left = threading.Lock(), [2]

    def outcome(number: int, piece: Piece, cancelled: threading.Event) -> None:
        fault = faults.get((number, piece.index))
        with lock:  # a hanging source fails in the end, as one that stalls does
            if fault == "hang" and hangs_left[0]:
                hangs_left[0] -= 1
            elif fault is not None:
                fault = "fail"
        if fault == "hang" and cancelled.wait(0.05):
            raise Cancelled
        if fault is not None:
            raise SourceFailed(Unavailable(f"source {number}"))

    segment = Segment(count, outcome)
    with links(sources) as found:
        load = transfer(segment, count, *map(source, range(sources)))
        try:
            load.run(found)
        except Unavailable:
            assert load.plan.published < count
        else:
            assert sorted(segment.published) == list(range(count))
            assert bytes(segment.data) == b"".join(map(content, pieces(count)))
    assert len(set(segment.published)) == len(segment.published)
    assert {number for number, _ in faults} >= set(range(sources)) or len(segment.published) == count


def test_piece_of_a_hanging_source_is_read_by_another_and_copied_when_it_has_ended() -> None:
    hanging, ended = threading.Event(), threading.Event()

    def outcome(number: int, piece: Piece, cancelled: threading.Event) -> None:
        if number == 1:
            hanging.set()
            assert cancelled.wait(60)
            ended.set()
            raise Cancelled
        assert hanging.wait(60)

    segment = Segment(6, outcome)
    with links(2) as found:
        transfer(segment, 6, source(0), source(1)).run(found)
        assert found[1].status().moved_bytes == 0, "a lost read says nothing of the speed"
    assert ended.is_set()
    assert segment.copied, "the hanging source was writing to the segment"
    assert sorted(segment.published) == list(range(6))


def test_error_that_is_not_a_source_s_ends_the_load() -> None:
    class Full(Segment):
        def keep(self, piece: Piece, fetched: Fetched) -> None:
            raise InsufficientMemory("full")

    segment = Full(4, read)
    with links(2) as found, pytest.raises(InsufficientMemory):
        transfer(segment, 4, source(0), source(1)).run(found)
    assert segment.published == []


def test_load_fails_with_the_error_of_the_last_source() -> None:
    def outcome(number: int, piece: Piece, cancelled: threading.Event) -> None:
        raise SourceFailed(Unavailable(f"source {number}"))

    with links(2) as found, pytest.raises(Unavailable, match="source 1"):
        transfer(Segment(4, outcome), 4, source(0), source(1, is_reserve=True)).run(found)


def after(event: threading.Event, then: Callable[[], None]) -> None:
    assert event.wait(60)
    then()


def hang(number: int, piece: Piece, cancelled: threading.Event) -> None:
    assert cancelled.wait(60)
    raise Cancelled


def test_cancelled_load_ends_when_no_read_writes_any_more() -> None:
    cancelled, begun = threading.Event(), threading.Event()

    def outcome(number: int, piece: Piece, stop: threading.Event) -> None:
        begun.set()
        hang(number, piece, stop)

    segment = Segment(4, outcome)
    canceller = threading.Thread(target=after, args=(begun, cancelled.set))
    canceller.start()
    with links(2) as found, pytest.raises(Cancelled):
        transfer(segment, 4, source(0), source(1), cancelled=cancelled).run(found)
    assert segment._writing == set()
    canceller.join()


def test_closing_a_link_ends_the_load() -> None:
    begun = threading.Event()

    def outcome(number: int, piece: Piece, stop: threading.Event) -> None:
        begun.set()
        hang(number, piece, stop)

    found = [Link("link0", 1)]
    closer = threading.Thread(target=after, args=(begun, found[0].close))
    closer.start()
    with pytest.raises(Cancelled):
        transfer(Segment(4, outcome), 4, source(0)).run(found)
    closer.join()


def test_loads_on_one_link_take_turns_and_the_striped_one_leaves_it() -> None:
    first, second = Segment(5, read), Segment(5, read)
    with links(2) as found:
        for segment in (first, second):
            transfer(segment, 5, source(0), source(1)).run(found)
        until(lambda: all(link.status().loads == 0 for link in found))
        assert sum(link.status().moved_bytes for link in found) == 10 * LENGTH
        assert [link.status().queued_bytes for link in found] == [0, 0]


def refuse_threads(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the links of these names start no thread."""
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.rpartition("-")[0] in names:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("refused", [0, 1])
def test_source_whose_link_can_start_no_thread_is_left_out(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    segment = Segment(5, read)
    with links(2) as found:
        refuse_threads(monkeypatch, f"link{refused}")
        load = transfer(segment, 5, source(0), source(1))
        load.run(found)
    assert sorted(segment.published) == list(range(5))
    assert [s.read_bytes for s in load.plan.sources][refused] == 0


def test_reserve_whose_link_can_start_no_thread_ends_the_load_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserve begins later than the load."""

    def outcome(number: int, piece: Piece, cancelled: threading.Event) -> None:
        raise SourceFailed(Unavailable(f"source {number}"))

    segment = Segment(5, outcome)
    with links(2) as found:
        refuse_threads(monkeypatch, "link1")
        with pytest.raises(RuntimeError, match="new thread"):
            transfer(segment, 5, source(0), source(1, is_reserve=True)).run(found)
        assert [link.status().loads for link in found] == [0, 0]
    assert segment.published == []


def test_load_without_any_thread_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with links(2) as found:
        refuse_threads(monkeypatch, "link0", "link1")
        with pytest.raises(RuntimeError, match="new thread"):
            transfer(Segment(5, read), 5, source(0), source(1)).run(found)


def test_request_raises_the_priority_on_every_link() -> None:
    begun, release, lock = threading.Semaphore(0), threading.Event(), threading.Lock()
    order: list[str] = []

    def outcome(name: str) -> Outcome:
        def do(number: int, piece: Piece, cancelled: threading.Event) -> None:
            with lock:
                order.append(name)
            begun.release()
            assert release.wait(60)

        return do

    found = [Link("link0", 1)]
    one = StripeSource("link0", 1)
    other = StripedTransfer([one], pieces(3), segment := Segment(3, outcome("other")), segment.publish)
    slow = StripedTransfer([one], pieces(3), third := Segment(3, outcome("prefetch")), third.publish, background=True)
    threads = [threading.Thread(target=other.run, args=(found,)), threading.Thread(target=slow.run, args=(found,))]
    try:
        threads[0].start()
        assert begun.acquire(timeout=60)
        threads[1].start()
        until(lambda: found[0].status().loads == 2)
        slow.raise_priority()
        release.set()
        for thread in threads:
            thread.join(60)
    finally:
        found[0].close()
    assert order == ["other", "other", "prefetch", "other", "prefetch", "prefetch"], "in turns from the second piece on"


def test_empty_load_ends_at_once() -> None:
    with links(1) as found:
        transfer(Segment(0, read), 0, source(0)).run(found)
