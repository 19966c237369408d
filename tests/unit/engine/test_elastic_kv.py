"""Which pages a KV cache borrows and returns."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.engine.domain.elastic_kv import RETURN_AFTER_S, Lease, adjust, lent, needed_blocks, next_adjustment, shrink
from services.engine.domain.step_planning import BLOCK_TOKENS, Limits, SequenceView

LEASE = Lease(floor=2, ceiling=20, block_bytes=1 << 20, page_bytes=2 << 20)
LIMITS = Limits(max_sequences=2, kv_blocks=40, step_tokens=100, chunk_tokens=100)


def holding(pages: int) -> Lease:
    return lent(replace(LEASE, asked=pages), pages, is_answer=True)


def test_need_counts_sequences_that_have_a_slot() -> None:
    running, waiting = [SequenceView(1, BLOCK_TOKENS)], [SequenceView(2, 1), SequenceView(3, 9 * BLOCK_TOKENS)]
    assert needed_blocks(running, waiting, LIMITS) == 2 + 2


def test_demand_has_a_margin_and_keeps_to_the_ceiling() -> None:
    assert adjust(holding(2), 8, 0, 0.0).ask == 5
    assert adjust(holding(2), 1000, 0, 0.0).ask == LEASE.ceiling


def test_idle_engine_returns_to_its_floor_after_a_while() -> None:
    first = adjust(holding(9), 0, 0, 1.0)
    assert (first.ask, first.give_back) == (None, 0)
    due = next_adjustment(first.lease)
    assert due == 1.0 + RETURN_AFTER_S
    second = adjust(first.lease, 0, 0, due)
    assert (second.ask, second.give_back, second.lease.held) == (2, 7, 2)
    assert next_adjustment(second.lease) is None


def test_short_lull_returns_nothing() -> None:
    quiet = adjust(holding(9), 0, 0, 1.0).lease
    busy = adjust(quiet, 16, 16, 1.5).lease
    assert adjust(busy, 0, 0, 2.0 + RETURN_AFTER_S).give_back == 0


def test_stalled_engine_returns_its_pages_and_asks_again_later() -> None:
    stalled = adjust(holding(9), 30, 0, 5.0, is_stalled=True)
    assert (stalled.ask, stalled.give_back) == (2, 7)
    due = next_adjustment(stalled.lease)
    assert due is not None
    assert adjust(stalled.lease, 30, 0, (5.0 + due) / 2, is_stalled=True).ask is None
    assert adjust(stalled.lease, 30, 0, due, is_stalled=True).ask == 16


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
            found = adjust(lease, a, used, now, is_stalled=is_stalled and not used)
            assert found.lease.held == lease.held - found.give_back
            assert found.lease.blocks >= used
            assert found.ask is None or lease.floor <= found.ask <= max(lease.ceiling, lease.pages_for(used))
            lease = found.lease
        elif kind == "lent":
            lease = lent(lease, max(0, min(a, lease.asked - lease.held)), is_answer=True)
        else:
            smaller = shrink(lease, a)
            assert min(lease.held, lease.floor) <= smaller.held <= lease.held
            lease = smaller
