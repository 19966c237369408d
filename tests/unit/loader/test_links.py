"""Links: the order of chunks, measured speed, and threads that follow the order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.launcher import until
from weights.tiers.port import Cancelled
from weights.transfer import link_queue as links
from weights.transfer.link import Link, Transfer
from weights.transfer.link_queue import Line, Load, Speed
from weights.transfer.pieces import Piece


def order(line: Line) -> list[int]:
    """Return the order of reads, one chunk at a time, until none is left."""
    taken = []
    while (load := links.find_next(line)) is not None:
        taken.append(load)
        line = links.record_end(links.record_begin(line, load, 10), load, 10)
    assert line.queued_bytes == 0
    return taken


def line(how: links.Order, *chunks: int, background: frozenset[int] = frozenset()) -> Line:
    found = Line(how)
    for number, count in enumerate(chunks):
        found = links.join(found, Load(number, count, count * 10, number in background))
    return found


def test_fair_loads_alternate_and_ordered_loads_run_in_sequence() -> None:
    assert order(line("fair", 3, 1, 2)) == [0, 1, 2, 0, 2, 0]
    assert order(line("in-order", 3, 1, 2)) == [0, 0, 0, 1, 2, 2]


def test_requests_precede_background_loads_until_their_priority_is_raised() -> None:
    assert order(line("fair", 2, 2, background=frozenset({0}))) == [1, 1, 0, 0]
    hurried = links.raise_priority(line("fair", 2, 2, background=frozenset({0})), 0)
    assert order(hurried) == [0, 1, 0, 1]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from(["fair", "in-order"]),
    st.sets(st.integers(0, 5)),
    st.data(),
)
def test_every_chunk_is_read_once_and_equal_loads_alternate(
    chunks: list[int], how: links.Order, background: set[int], data: st.DataObject
) -> None:
    found = line(how, *chunks, background=frozenset(background))
    gone = data.draw(st.sets(st.sampled_from(range(len(chunks)))))
    for load in gone:
        found = links.leave(found, load)
    taken = order(found)
    for number, count in enumerate(chunks):
        assert taken.count(number) == (0 if number in gone else count)
    asked = [n for n in taken if n not in background]
    assert taken[: len(asked)] == asked
    if how == "fair":
        for n, m in ((n, m) for n in asked for m in asked):
            both = min(chunks[n], chunks[m])
            first = [x for x in asked if x in (n, m)][: 2 * both]
            assert all(abs(first[:i].count(n) - first[:i].count(m)) <= 1 for i in range(len(first) + 1) if n != m)


def test_speed_is_the_median_window_and_idle_time_does_not_count() -> None:
    speed, now = Speed(), 100.0
    for rate in (1000, 1000, 10, 1000, 90_000):
        speed = links.record_busy(speed, now)
        now += 0.1
        speed = links.record_bytes(speed, int(rate * 0.1), now)
        speed = links.record_idle(speed, now)
        now += 50
    assert speed.bytes_per_second == pytest.approx(1000)


def test_a_short_load_is_measured_too() -> None:
    speed = links.record_idle(links.record_bytes(links.record_busy(Speed(), 1.0), 500, 1.01), 1.01)
    assert speed.bytes_per_second == pytest.approx(50_000)
    assert links.record_idle(links.record_bytes(links.record_busy(speed, 2.0), 1, 2.001), 2.001).windows == speed.windows


def pieces(count: int) -> list[Piece]:
    return [Piece(i, 0, i * 10, 10, i * 10) for i in range(count)]


class Gate:
    """Blocks reads until they are released, and records them."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self._let = threading.Semaphore(0)
        self._begun_reads = threading.Semaphore(0)

    def reader(self, name: str) -> object:
        def read(piece: Piece) -> None:
            self.begun.append((name, piece.index))
            self._begun_reads.release()
            assert self._let.acquire(timeout=60)

        return read

    def let(self, count: int = 1) -> None:
        self._let.release(count)

    def await_begun(self) -> None:
        assert self._begun_reads.acquire(timeout=60)


def transfer(gate: Gate, name: str, count: int, **options: object) -> Transfer:
    return Transfer(pieces(count), gate.reader(name), **options)  # type: ignore[arg-type]  # passed through


def test_link_serves_loads_in_queue_order_and_reports_them() -> None:
    gate, link = Gate(), Link("ssd:x", 1)
    background = link.submit(transfer(gate, "background", 3, background=True))
    gate.await_begun()
    a, b = link.submit(transfer(gate, "a", 2)), link.submit(transfer(gate, "b", 2))
    status = link.status()
    assert (status.link, status.loads, status.queued_bytes) == ("ssd:x", 3, 70)
    gate.let(5)
    a.result()
    b.result()
    link.raise_priority(background)
    gate.let(2)
    background.result()
    names = [name for name, _ in gate.begun]
    assert names == ["background", "a", "b", "a", "b", "background", "background"]
    status = link.status()
    assert (status.loads, status.queued_bytes, status.finish_ms) == (0, 0, None)
    assert status.bytes_per_second
    assert status.moved_bytes == 7 * 10
    link.close()


def test_cancelled_load_ends_at_its_next_piece_and_others_continue() -> None:
    gate, link, cancelled = Gate(), Link("x", 1), threading.Event()
    gone, stays = link.submit(transfer(gate, "gone", 9, cancelled=cancelled)), link.submit(transfer(gate, "stays", 2))
    gate.await_begun()
    cancelled.set()
    gate.let(9)
    with pytest.raises(Cancelled):
        gone.result()
    stays.result()
    assert [name for name, _ in gate.begun].count("gone") == 1
    link.close()


def test_failed_load_ends_when_its_last_reader_returns() -> None:
    gate, link = Gate(), Link("x", 2)
    reading = threading.Event()

    def read(piece: Piece) -> None:
        if piece.index == 0:
            reading.set()
            gate.await_begun()
        else:
            assert reading.wait(60)
            raise OSError("broken")

    failing = link.submit(Transfer(pieces(5), read))
    assert not failing._over.wait(0.2)  # its first piece is still being read
    gate._begun_reads.release()
    with pytest.raises(OSError, match="broken"):
        failing.result()
    assert link.status().queued_bytes == 0
    link.close()


def test_closing_a_link_ends_its_loads_and_threads() -> None:
    gate, link = Gate(), Link("closing", 2)
    load = link.submit(transfer(gate, "a", 50))
    gate.await_begun()
    closer = threading.Thread(target=link.close)
    closer.start()
    until(lambda: not link.status().loads, what="the link to drop its loads")  # the pieces being read hold the load itself
    gate.let(50)
    with pytest.raises(Cancelled):
        load.result()
    closer.join(60)
    assert not [t for t in threading.enumerate() if t.name.startswith("closing-")]


def test_load_submitted_to_a_closed_link_is_cancelled() -> None:
    link = Link("x", 1)
    link.close()
    load = link.submit(Transfer(pieces(2), lambda _: None))
    assert load._over.wait(60)
    with pytest.raises(Cancelled):
        load.result()


def test_load_of_a_link_without_threads_is_refused_and_not_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller frees the memory after an error."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    link = Link("x", 1)
    read: list[Piece] = []
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            link.submit(Transfer(pieces(2), read.append))
    assert link.submit(Transfer(pieces(1), lambda _: None))._over.wait(60), "a later load has a thread"
    link.close()
    assert read == []


def test_load_is_read_by_the_present_threads_if_no_other_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate, link = Gate(), Link("x", 2)
    first = link.submit(transfer(gate, "first", 1))
    gate.await_begun()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        second = link.submit(transfer(gate, "second", 3))
        gate.let(4)
        first.result()
        second.result()
    assert gate.begun == [("first", 0), ("second", 0), ("second", 1), ("second", 2)]
    link.close()


def test_empty_transfer_completes_immediately(tmp_path: Path) -> None:
    link = Link("x", 1)
    link.submit(Transfer([], lambda _: None)).result()
    link.close()
