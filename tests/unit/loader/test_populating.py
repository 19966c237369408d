"""Memory of a load: populated ahead of the readers, in the better kind of pages."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InsufficientMemory
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import Pages, PoolMemory
from weights.pool.region import Region
from weights.tiers.port import Cancelled
from weights.transfer.page_sizes import AHEAD, HUGE_LIMIT, Costs, choose, record_cost, wants_thread
from weights.transfer.pieces import Piece
from weights.transfer.populating import Populating

MB = 1024 * 1024


def load_pieces(count: int, nbytes: int = CHUNK_BYTES) -> list[Piece]:
    return [Piece(i, 0, i * nbytes, nbytes, i * nbytes) for i in range(count)]


class RecordedSpace:
    """A region that records what is populated, and may block or fail."""

    def __init__(self, grants: Pages = "huge", fail_at: int | None = None) -> None:
        self.grants, self.fail_at = grants, fail_at
        self.ranges: list[tuple[int, int]] = []
        self.released = threading.Event()
        self.released.set()
        self.begun = threading.Semaphore(0)
        self.both_inside = threading.Event()
        self._inside: set[int] = set()

    def populate(self, offset: int, length: int, *, huge: bool = False) -> Pages | None:
        self.begun.release()
        self._inside.add(threading.get_ident())
        if len(self._inside) > 1:
            self.both_inside.set()
        assert self.released.wait(60)
        self._inside.discard(threading.get_ident())
        if self.fail_at is not None and offset >= self.fail_at:
            raise InsufficientMemory("full")
        self.ranges.append((offset, length))
        return self.grants if huge else "small"

    def is_ready(self, offset: int, length: int) -> bool:
        return False

    def write(self, offset: int, data: memoryview | bytes) -> None:
        raise NotImplementedError

    def copy(self, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def view(self, offset: int, length: int) -> memoryview:
        raise NotImplementedError


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    memory = PoolMemory(None, 6 * CHUNK_BYTES)
    yield memory
    memory.close()


def test_both_kinds_are_measured_before_one_is_chosen() -> None:
    costs = Costs()
    assert choose(costs) == "huge"
    costs = record_cost(costs, "huge", "huge", 4 * MB, 0.004)
    assert choose(costs) == "small"
    assert choose(record_cost(costs, "small", "small", 4 * MB, 0.003)) == "huge"
    assert choose(record_cost(costs, "small", "small", 4 * MB, 0.001)) == "small"


def test_refused_huge_pages_are_not_asked_for_again() -> None:
    assert choose(record_cost(Costs(), "huge", "small", 4 * MB, 0.001)) == "small"


@given(st.floats(1e-12, 1e-6), st.floats(1e-12, 1e-6))
def test_small_pages_are_chosen_only_where_huge_ones_cost_much_more(huge: float, small: float) -> None:
    assert (choose(Costs(small, huge)) == "small") == (huge > HUGE_LIMIT * small)


@given(st.integers(0, 8), st.integers(1, 8), st.integers(0, 1000))
def test_threads_are_added_up_to_their_limit(running: int, most: int, begun: int) -> None:
    if running == 0:
        assert wants_thread(running, most, begun)
    elif wants_thread(running, most, begun):
        assert running < most
        assert begun > 0


def test_threads_stay_a_bounded_number_of_pieces_ahead() -> None:
    space = RecordedSpace()
    populating = Populating(pieces := load_pieces(3 * AHEAD), space, most_threads=1)
    populating.wait(pieces[0])
    populating.wait(pieces[AHEAD])  # allowed from the first request on
    last = 2 * AHEAD
    populating.wait(pieces[last])
    populating.close()
    assert max(at for at, _ in space.ranges) <= (last + AHEAD) * CHUNK_BYTES
    assert sum(n for at, n in space.ranges if at < (last + 1) * CHUNK_BYTES) == (last + 1) * CHUNK_BYTES


def test_memory_is_populated_in_the_order_of_the_reads() -> None:
    """The tensors that an engine needs first may be the last of the file."""
    space = RecordedSpace()
    order = [*reversed(load_pieces(3 * AHEAD))]
    populating = Populating(order, space, most_threads=1)
    populating.wait(order[0])
    populating.close()
    assert {at // CHUNK_BYTES for at, _ in space.ranges} <= {p.index for p in order[: AHEAD + 1]}


def test_a_reader_that_waits_adds_a_thread() -> None:
    space = RecordedSpace()
    populating = Populating(pieces := load_pieces(4 * AHEAD), space, most_threads=2)
    populating.wait(pieces[AHEAD - 1])
    space.released.clear()
    reader = threading.Thread(target=populating.wait, args=(pieces[-1],))
    reader.start()
    assert space.both_inside.wait(60)  # two threads populate at once
    space.released.set()
    reader.join(60)
    populating.close()
    assert sorted(set(space.ranges)) == sorted(space.ranges)
    assert sum(n for _, n in space.ranges) == 4 * AHEAD * CHUNK_BYTES


def populating_closes(populating: Populating, space: RecordedSpace) -> None:
    """Close `populating` while its threads are in the kernel."""
    closing = threading.Thread(target=populating.close)
    closing.start()
    space.released.set()
    closing.join()


def test_skipped_pieces_get_no_memory() -> None:
    space = RecordedSpace()
    populating = Populating(pieces := load_pieces(4), space, most_threads=1)
    populating.skip(pieces[0])
    populating.skip(pieces[2])
    populating.wait(pieces[3])
    populating.close()
    assert {at // CHUNK_BYTES for at, _ in space.ranges} == {1, 3}


def test_readers_get_the_error_of_the_populating_thread() -> None:
    space = RecordedSpace(fail_at=CHUNK_BYTES)
    populating = Populating(pieces := load_pieces(3), space, most_threads=2)
    populating.wait(pieces[0])
    for piece in pieces[1:]:
        with pytest.raises(InsufficientMemory):
            populating.wait(piece)
    populating.close()


def test_a_thread_that_cannot_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    populating = Populating(pieces := load_pieces(1), RecordedSpace())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        populating.wait(pieces[0])
    populating.close()


def test_a_waiting_reader_is_cancelled_by_close() -> None:
    space = RecordedSpace()
    space.released.clear()
    populating = Populating(pieces := load_pieces(2 * AHEAD), space, most_threads=1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            populating.wait(pieces[-1])
        except Cancelled as e:
            errors.append(e)

    reader = threading.Thread(target=wait)
    reader.start()
    assert space.begun.acquire(timeout=60)
    populating_closes(populating, space)
    reader.join(60)
    assert len(errors) == 1


def test_populated_memory_is_exactly_the_pieces(pool: PoolMemory) -> None:
    total = 2 * CHUNK_BYTES + 5 * MB + 4096
    region = Region(pool, [4, 1, 3], total)
    starts = [4096, CHUNK_BYTES, 2 * CHUNK_BYTES]
    ends = [*starts[1:], total]
    pieces = [Piece(i, 0, a, b - a, a) for i, (a, b) in enumerate(zip(starts, ends, strict=True))]
    region.write(0, bytes(4096))
    populating = Populating(pieces, region)
    for piece in pieces:
        populating.wait(piece)
        assert pool.has_memory(region.chunks[piece.index] * CHUNK_BYTES, piece.target % CHUNK_BYTES + piece.length)
    populating.close()
    assert pool.count_allocated() == total
    assert pool.punch([1, 3, 4]) == total


def test_a_full_pool_is_insufficient_memory(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    populating = Populating(pieces := load_pieces(1), Region(pool, [0], CHUNK_BYTES))
    with pytest.raises(InsufficientMemory):
        populating.wait(pieces[0])
    populating.close()


def test_freed_bytes_are_exact_while_others_populate(pool: PoolMemory) -> None:
    """Counting the file's blocks excludes threads that add some."""
    stop = threading.Event()

    def populate_and_punch() -> None:
        while not stop.is_set():
            pool.prepare_huge(5)
            pool.punch([5])

    other = threading.Thread(target=populate_and_punch)
    other.start()
    try:
        for _ in range(20):
            pool.prepare_huge(1)
            assert pool.punch([1]) == CHUNK_BYTES
    finally:
        stop.set()
        other.join()
