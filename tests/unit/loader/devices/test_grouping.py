"""Grouping, order and the watermark, without a device."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from weights.devices.grouping import CopyQueue, Group, Ranges, Run, Watermark
from weights.devices.port import Priority

GROUP = 100
cuts = st.lists(st.integers(1, 999), unique=True, max_size=20).map(lambda c: [0, *sorted(c), 1000])
ranges = cuts.map(lambda c: list(itertools.pairwise(c))).flatmap(st.permutations)


@given(ranges)
def test_the_watermark_is_the_first_gap(given_ranges: list[tuple[int, int]]) -> None:
    watermark, there = Watermark(), set[int]()
    for start, end in given_ranges:
        there |= set(range(start, end))
        expected = next((n for n in range(1000) if n not in there), 1000)
        assert watermark.add(start, end - start) == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=25))
def test_overlapping_ranges_are_refused(wanted: list[tuple[int, int]]) -> None:
    ranges, taken = Ranges(), set[int]()
    for start, length in wanted:
        mine = set(range(start, start + length))
        assert ranges.take(start, start + length) is not bool(taken & mine)
        if not taken & mine:
            taken |= mine


@given(ranges, st.integers(1, 400), st.integers(1, 3))
def test_every_byte_is_copied_once_in_bounded_groups(given_ranges: list[tuple[int, int]], size: int, window: int) -> None:
    queue = CopyQueue(size, window)
    queue.open(1, 0)
    moved: list[Run] = []
    under_way: list[Group] = []

    def drain() -> None:
        while (group := queue.take_group()) is not None:
            assert 0 < group.nbytes <= size
            under_way.append(group)
            moved.extend(group.runs)
        assert len(under_way) == queue.under_way <= window

    for start, end in given_ranges:
        queue.add(1, Run(start, 5000 + start, end - start))
        drain()
    while under_way:
        queue.finish(under_way.pop(0))
        drain()
    assert queue.queued_bytes == 0
    assert all(run.address == 5000 + run.offset for run in moved)
    assert sorted(n for run in moved for n in range(run.offset, run.end)) == list(range(1000))


def queue_of(*arenas: tuple[int, Priority], window: int = 2, order: str = "arrival") -> CopyQueue:
    queue = CopyQueue(GROUP, window, "fair" if order == "fair" else "arrival")
    for number, priority in arenas:
        queue.open(number, priority)
    return queue


def test_adjacent_ranges_become_one_copy() -> None:
    queue = queue_of((1, Priority.REQUEST))
    for offset, address in ((0, 1000), (10, 1010), (20, 3000)):
        queue.add(1, Run(offset, address, 10))
    group = queue.take_group()
    assert group is not None
    assert group.runs == (Run(0, 1000, 20), Run(20, 3000, 10))


def test_neighbours_of_different_page_locked_ranges_stay_apart() -> None:
    queue = queue_of((1, Priority.REQUEST))
    runs = (Run(0, 1000, 10, pin=900), Run(10, 1010, 10, pin=1010))
    queue.add(1, *runs)
    group = queue.take_group()
    assert group is not None
    assert group.runs == runs


def test_small_range_is_copied_immediately_on_an_idle_bus() -> None:
    queue = queue_of((1, Priority.REQUEST))
    queue.add(1, Run(0, 0, 1))
    first = queue.take_group()
    assert first is not None
    queue.add(1, Run(1, 1, 1))
    assert queue.take_group() is None  # too small for a copy of its own while another runs
    queue.finish(first)
    assert queue.take_group() is not None


def test_requests_first_from_the_next_group_on() -> None:
    queue = queue_of((1, Priority.BACKGROUND), (2, Priority.REQUEST), window=3)
    queue.add(1, Run(0, 0, 1000))
    assert [g.arena for g in (queue.take_group(),) if g] == [1]
    queue.add(2, Run(0, 0, 10))
    assert [g.arena for g in (queue.take_group(), queue.take_group()) if g] == [
        2,
        1,
    ]  # though small, it does not wait for the background


def test_raised_priority_overtakes_other_arenas() -> None:
    queue = queue_of((1, Priority.BACKGROUND), (2, Priority.BACKGROUND), window=9)
    for arena in (1, 2):
        queue.add(arena, Run(0, 0, 300))
    queue.prioritise(2, Priority.REQUEST)
    assert [g.arena for g in iter(queue.take_group, None)] == [2, 2, 2, 1, 1, 1]


def test_in_order_of_arrival_or_fairly() -> None:
    for order, expected in (("arrival", [1, 1, 2, 2]), ("fair", [1, 2, 1, 2])):
        queue = queue_of((1, Priority.REQUEST), (2, Priority.REQUEST), window=9, order=order)
        for arena in (1, 2):
            queue.add(arena, Run(0, 0, 200))
        assert [g.arena for g in iter(queue.take_group, None)] == expected


def test_closed_or_dropped_arena_copies_nothing_more() -> None:
    queue = queue_of((1, Priority.REQUEST), (2, Priority.REQUEST), window=9)
    for arena in (1, 2):
        queue.add(arena, Run(0, 0, 300))
    first = queue.take_group()
    assert first is not None
    queue.close(1)
    queue.drop(2)
    queue.drop(1)
    assert queue.take_group() is None
    assert queue.queued_bytes == GROUP
    queue.finish(first)
    assert queue.queued_bytes == 0
