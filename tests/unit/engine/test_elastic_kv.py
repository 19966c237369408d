"""Which pages a KV cache borrows and returns, and when it asks for a turn."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.elastic_kv import (
    RETURN_AFTER_S,
    Demand,
    Lease,
    Need,
    add_lent,
    adjust,
    needed_blocks,
    next_adjustment,
    shrink,
)
from services.engine.domain.step_planning import BLOCK_TOKENS, MAX_PREEMPTIONS, Limits, SequenceView

LEASE = Lease(floor=2, ceiling=20, block_bytes=1 << 20, page_bytes=2 << 20)
LIMITS = Limits(max_sequences=2, kv_blocks=40, step_tokens=100, chunk_tokens=100)
OLDEST = SequenceView(7, 9 * BLOCK_TOKENS, greatest_length=12 * BLOCK_TOKENS)


def holding(pages: int) -> Lease:
    return add_lent(replace(LEASE, asked=Demand(pages)), pages, is_answer=True)


def test_need_counts_sequences_that_have_a_slot() -> None:
    running, waiting = [SequenceView(1, BLOCK_TOKENS)], [SequenceView(2, 1), SequenceView(3, 9 * BLOCK_TOKENS)]
    assert needed_blocks(running, waiting, LIMITS) == 2 + 2


def test_demand_has_a_margin_and_keeps_to_the_ceiling() -> None:
    assert adjust(holding(2), Need(8, 0), 0.0).ask == Demand(5)
    assert adjust(holding(2), Need(1000, 0), 0.0).ask == Demand(LEASE.ceiling)


def test_idle_engine_returns_to_its_floor_after_a_while() -> None:
    first = adjust(holding(9), Need(0, 0), 1.0)
    assert (first.ask, first.give_back) == (None, 0)
    due = next_adjustment(first.lease)
    assert due == 1.0 + RETURN_AFTER_S
    second = adjust(first.lease, Need(0, 0), due)
    assert (second.ask, second.give_back, second.lease.held) == (Demand(2), 7, 2)
    assert next_adjustment(second.lease) is None


def test_short_lull_returns_nothing() -> None:
    quiet = adjust(holding(9), Need(0, 0), 1.0).lease
    busy = adjust(quiet, Need(16, 16), 1.5).lease
    assert adjust(busy, Need(0, 0), 2.0 + RETURN_AFTER_S).give_back == 0


def test_stalled_engine_asks_for_pages_first_and_then_for_a_turn() -> None:
    stalled = Need(10, 0, oldest=OLDEST, is_stalled=True)
    first = adjust(holding(2), stalled, 0.0)
    assert first.ask == Demand(6)
    assert adjust(first.lease, stalled, 0.0).ask is None  # not answered yet
    second = adjust(add_lent(first.lease, 1, is_answer=True), stalled, 0.0)
    assert second.ask == Demand(6, turn=1, turn_pages=5)
    assert second.lease.protected is None
    granted = add_lent(second.lease, 3, is_answer=True, turn=1)
    assert granted.protected == OLDEST.key
    longer = Need(12, 10, oldest=replace(OLDEST, length=11 * BLOCK_TOKENS))
    assert adjust(granted, longer, 0.0).ask == Demand(7, turn=1, turn_pages=6)


def test_turn_ends_with_its_sequence() -> None:
    turn = adjust(holding(6), Need(10, 0, oldest=OLDEST, is_stalled=True), 0.0).lease
    other = Need(4, 0, oldest=replace(OLDEST, key=8))
    ended = adjust(add_lent(turn, 0, is_answer=True, turn=1), other, 0.0)
    assert ended.ask == Demand(6)
    assert ended.lease.turn is None
    again = adjust(add_lent(ended.lease, 0, is_answer=True), replace(other, blocks=9, is_stalled=True), 0.0)
    assert again.ask is not None
    assert again.ask.turn == 2


def test_aged_sequence_asks_for_a_turn_unless_the_floor_suffices() -> None:
    aged = replace(OLDEST, preemptions=MAX_PREEMPTIONS)
    assert adjust(holding(6), Need(10, 0, oldest=aged), 0.0).ask == Demand(6, turn=1, turn_pages=5)
    small = replace(aged, length=BLOCK_TOKENS, greatest_length=4 * BLOCK_TOKENS)
    assert adjust(holding(2), Need(2, 0, oldest=small), 0.0).ask is None


def test_loader_that_knows_no_turns_counts_as_one_that_grants_them() -> None:
    asked = adjust(holding(6), Need(10, 0, oldest=OLDEST, is_stalled=True), 0.0).lease
    assert add_lent(asked, 0, is_answer=True, turn=None).protected == OLDEST.key
    assert add_lent(asked, 0, is_answer=True, turn=0).protected is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["adjust", "lent", "shrink"]), st.integers(0, 60), st.integers(0, 60), st.floats(0, 5), st.booleans()
        )
    )
)
def test_used_blocks_always_have_pages(events: list[tuple[str, int, int, float, bool]]) -> None:
    """The engine returns no page that it uses, and asks for its floor to its ceiling."""
    lease, now = holding(2), 0.0
    for kind, a, b, passed, is_stalled in events:
        now += passed
        if kind == "adjust":
            used = min(b, lease.blocks)
            found = adjust(lease, Need(a, used, oldest=OLDEST if a else None, is_stalled=is_stalled and not used), now)
            assert found.lease.held == lease.held - found.give_back
            assert found.lease.blocks >= used
            if found.ask is not None:
                assert lease.floor <= found.ask.pages <= max(lease.ceiling, lease.pages_for(used))
                assert found.ask.turn_pages <= found.ask.pages
            lease = found.lease
        elif kind == "lent":
            lease = add_lent(lease, max(0, min(a, lease.asked.pages - lease.held)), is_answer=True, turn=b % 3)
        else:
            smaller = shrink(lease, a)
            assert min(lease.held, lease.floor) <= smaller.held <= lease.held
            lease = smaller
