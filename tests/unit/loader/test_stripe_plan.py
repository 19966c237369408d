"""The plan of a striped load, as values: who reads what, and that each piece counts once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from weights.pool.chunks import CHUNK_BYTES
from weights.transfer import stripe_plan as plans
from weights.transfer.pieces import TAIL_PIECE_BYTES, Piece
from weights.transfer.stripe_plan import Attempt, StripePlan, StripeSource

LENGTH = 100


def pieces(count: int) -> tuple[Piece, ...]:
    return tuple(Piece(i, 0, i * LENGTH, LENGTH, i * LENGTH) for i in range(count))


@dataclass
class Load:
    """A plan whose attempts are ended one by one, and what was published."""

    plan: StripePlan
    now: float = 0.0
    published: list[int] = field(default_factory=list)

    def claim(self, source: int) -> Attempt | None:
        self.plan, attempt = plans.claim(self.plan, source, self.now)
        return attempt

    def begin(self, source: int) -> Attempt:
        attempt = self.claim(source)
        assert attempt is not None
        return attempt

    def read(self, attempt: Attempt) -> bool:
        self.plan, is_first = plans.record_read(self.plan, attempt.number, self.now)
        return is_first

    def publish(self, attempt: Attempt) -> None:
        self.plan = plans.record_published(self.plan, attempt.number)
        self.published.append(attempt.piece.index)

    def complete(self, attempt: Attempt) -> None:
        assert self.read(attempt)
        self.publish(attempt)

    def fail(self, attempt: Attempt) -> None:
        self.plan = plans.record_failed(self.plan, attempt.number)


def load(count: int, *sources: StripeSource) -> Load:
    return Load(plans.make_plan(sources, pieces(count), 0.0))


def source(name: str, most: int = 1, **options: bool) -> StripeSource:
    return StripeSource(name, most, **options)


def test_each_source_reads_as_many_pieces_as_its_speed_allows() -> None:
    found = load(12, source("quick"), source("slow"))
    quick, slow = found.claim(0), found.claim(1)
    while not found.plan.is_complete:
        found.now += 1.0
        if found.now % 3 == 0 and slow is not None:
            found.complete(slow)
            slow = found.claim(1)
        if quick is not None and found.read(quick):
            found.publish(quick)
        quick = found.claim(0)
    assert sorted(found.published) == list(range(12))
    assert found.plan.sources[0].read_bytes == 9 * LENGTH


def test_a_source_has_no_more_pieces_in_flight_than_it_may() -> None:
    found = load(9, source("a", 2), source("b", 3))
    assert [found.claim(0) is not None for _ in range(3)] == [True, True, False]
    assert [found.claim(1) is not None for _ in range(4)] == [True, True, True, False]
    assert plans.list_left(found.plan, 0, found.now)[0] == 0


def test_pieces_of_a_failed_source_are_read_next_by_others() -> None:
    found = load(6, source("a", 2), source("b", 3))
    first, second = found.begin(0), found.begin(0)
    found.begin(1)
    found.fail(second)
    assert found.claim(0) is None
    assert plans.get_attempt(found.plan, first.number).is_lost
    assert [found.begin(1).piece, found.begin(1).piece] == [second.piece, first.piece]


def test_failure_of_the_last_source_leaves_no_source() -> None:
    found = load(2, source("a"), source("b"))
    for n in (0, 1):
        assert not found.plan.is_stuck
        found.fail(found.begin(n))
    assert found.plan.is_stuck


def test_a_piece_of_a_failed_source_is_copied_while_that_still_writes() -> None:
    found = load(1, source("a", 2), source("b"))
    lost = found.begin(0)
    found.now = 10.0
    copy = found.begin(1)
    assert (lost.is_direct, copy.is_direct) == (True, False)
    assert found.read(copy)
    assert not plans.is_alone(found.plan, copy)
    assert not found.read(lost)
    assert plans.is_alone(found.plan, copy)
    found.publish(copy)
    assert found.plan.is_complete


def test_an_idle_source_reads_a_slow_one_s_last_piece_again() -> None:
    found = load(3, source("quick"), source("slow"))
    slow = found.begin(1)
    for _ in range(2):
        quick = found.begin(0)
        found.now += 1.0
        found.complete(quick)
    assert found.claim(0) is not None, "the slow one has taken twice as long by now"
    assert found.claim(1) is None
    assert plans.get_attempt(found.plan, slow.number).is_reading


def test_a_stalled_source_does_not_read_others_pieces_again() -> None:
    found = load(4, source("a"), source("b"), source("quick"))
    found.begin(0)
    found.begin(1)
    for _ in range(2):
        quick = found.begin(2)
        found.now += 1.0
        found.complete(quick)
    found.now += 10.0
    again = found.begin(2)
    found.now += 1.0
    assert found.read(again)
    [lost] = [a for a in found.plan.attempts if a.is_lost]
    found.plan = plans.record_ended(found.plan, lost.number)
    found.publish(again)
    assert found.claim(lost.source) is None, "it has stalled as well"
    found.complete(found.begin(2))
    assert found.plan.is_complete


def test_a_piece_that_two_stalled_sources_read_is_read_again() -> None:
    found = load(2, source("a"), source("b"), source("quick"))
    stalled = found.begin(0)
    found.complete(found.begin(1))
    found.now = 10.0
    assert found.begin(1).piece == stalled.piece
    found.now = 20.0
    copy = found.begin(2)
    assert copy.piece == stalled.piece
    assert found.read(copy)
    assert all(a.is_lost for a in found.plan.attempts if a.number != copy.number)


def test_sources_of_equal_speed_do_not_read_pieces_twice() -> None:
    found = load(3, source("a"), source("b"))
    first, second = found.begin(0), found.begin(1)
    found.now = 1.0
    found.complete(first)
    found.begin(0)
    found.now = 1.2
    found.complete(second)
    for found.now in (1.2, 1.9, 2.7):
        assert found.claim(1) is None
    found.now = 2.9
    assert found.claim(1) is not None, "it has taken longer than the others need"


def test_reserve_reads_nothing_while_others_make_progress() -> None:
    found = load(4, source("peer"), source("origin", is_reserve=True))
    for _ in range(3):
        attempt = found.begin(0)
        found.now += 2.0
        assert found.claim(1) is None
        assert plans.list_left(found.plan, 1, found.now) == (0, 0)
        found.complete(attempt)
    found.begin(0)
    found.now += plans.RESERVE_AFTER_S - 0.1
    assert found.claim(1) is None
    found.now += 2 * plans.RESERVE_AFTER_S
    assert found.claim(1) is not None, "the peer has stalled"


def test_reserve_replaces_failed_sources() -> None:
    found = load(2, source("peer"), source("origin", 2, is_reserve=True))
    found.fail(found.begin(0))
    found.complete(found.begin(1))
    found.complete(found.begin(1))
    assert found.plan.is_complete


def test_pieces_from_this_host_s_disk_say_nothing_of_the_source() -> None:
    found = load(1, source("peer"))
    attempt = found.begin(0)
    found.plan, _ = plans.record_read(found.plan, attempt.number, 1.0, from_source=False)
    assert found.plan.sources[0] == source("peer")


def test_shares_of_the_bytes_left_follow_what_was_read() -> None:
    found = load(10, source("quick"), source("slow"))
    for _ in range(3):
        attempt = found.begin(0)
        found.now += 1.0
        found.complete(attempt)
    left = 7 * LENGTH
    assert [plans.list_left(found.plan, s, found.now) for s in (0, 1)] == [(1, left * 4 // 5), (1, left // 5)]


@pytest.mark.parametrize(
    ("total", "sources", "length"), [(1 << 40, 3, 1 << 24), (1 << 29, 3, 1 << 23), (1 << 28, 4, 1 << 22), (1, 2, 1 << 22)]
)
def test_pieces_are_short_enough_for_each_source_to_read_several(total: int, sources: int, length: int) -> None:
    assert plans.piece_bytes(total, sources, CHUNK_BYTES, TAIL_PIECE_BYTES) == length


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4), st.integers(0, 8), st.data())
def test_each_piece_is_published_once_whatever_fails(kinds: list[tuple[int, bool]], count: int, data: st.DataObject) -> None:
    found = load(count, *(StripeSource(str(i), most, is_reserve) for i, (most, is_reserve) in enumerate(kinds)))
    while not found.plan.is_complete and not found.plan.is_stuck:
        plan = found.plan
        steps = [("claim", s) for s in range(len(kinds)) if plans.find_piece(plan, s, found.now) is not None]
        for attempt in plan.attempts:
            if not attempt.is_won:
                steps += [("read", attempt.number), ("fail", attempt.number)]
            elif plans.is_alone(plan, attempt):
                steps.append(("publish", attempt.number))
        assert steps, "some source can always continue"
        what, number = data.draw(st.sampled_from(steps))
        if what == "claim":
            assert plans.list_left(plan, number, found.now)[0] > 0
            found.begin(number)
        elif what == "read":
            found.read(plans.get_attempt(plan, number))
        elif what == "fail":
            found.fail(plans.get_attempt(plan, number))
        else:
            found.publish(plans.get_attempt(plan, number))
        found.now += data.draw(st.sampled_from([0.0, 0.5, 5.0]))
        check(found)
    if found.plan.is_complete:
        assert sorted(found.published) == list(range(count))
    else:
        assert all(s.is_out for s in found.plan.sources)


def check(found: Load) -> None:
    attempts = found.plan.attempts
    assert len(found.published) == len(set(found.published))
    for number, one in enumerate(found.plan.sources):
        assert sum(a.source == number for a in attempts) <= one.most
    for piece in {a.piece for a in attempts}:
        assert sum(a.is_direct for a in attempts if a.piece == piece) <= 1, "two would write to the same memory"
        assert sum(a.is_won for a in attempts if a.piece == piece) <= 1
    assert sum(not a.is_direct for a in attempts) <= plans.MOST_COPIES
    unread = {*found.plan.returned, *found.plan.pieces[found.plan.begun :]}
    seen = {a.piece for a in attempts if not a.is_lost} | unread
    assert {p.index for p in seen} == set(range(len(found.plan.pieces))) - set(found.published)
