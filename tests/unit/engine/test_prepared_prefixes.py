"""Preparations for expected requests use only the memory and batch room left over.

Current requests have priority.
"""

from __future__ import annotations

from dataclasses import replace

from services.engine.domain.background_prefill import common_prefix_length, free_blocks, prefill_tokens, unused_blocks
from services.engine.domain.step_planning import BLOCK_TOKENS, Limits, SequenceView, StepPlan, Work

LIMITS = Limits(max_sequences=8, kv_blocks=10, step_tokens=8192, chunk_tokens=256)


def test_prefill_gets_the_token_budget_left_by_running_requests() -> None:
    assert prefill_tokens(StepPlan(), LIMITS) == 256
    assert prefill_tokens(StepPlan((Work(1, 1), Work(2, 1))), LIMITS) == 32
    assert prefill_tokens(StepPlan((Work(1, 1), Work(2, 40))), LIMITS) == 0


def test_free_blocks_exclude_the_known_needs_of_requests() -> None:
    running, waiting = [SequenceView(1, 2 * BLOCK_TOKENS, 5)], [SequenceView(2, BLOCK_TOKENS + 1)]
    assert free_blocks([], [], LIMITS) == 10
    assert free_blocks(running, waiting, LIMITS) == 10 - (2 + 1) - (2 + 1)


def test_growing_requests_evict_prepared_blocks() -> None:
    after = [SequenceView(1, 7 * BLOCK_TOKENS, 7 * BLOCK_TOKENS)]
    assert unused_blocks(after, 3, LIMITS) == 0
    assert unused_blocks(after, 5, LIMITS) == -2


def test_common_prefix_length_of_two_sequences() -> None:
    assert common_prefix_length((1, 2, 3), (1, 2, 3, 4)) == 3
    assert common_prefix_length((1, 2, 3), (1, 9, 3)) == 1
    assert common_prefix_length((), (1,)) == 0


def test_prefill_does_not_exceed_the_tokens_of_a_step() -> None:
    small = replace(LIMITS, step_tokens=20)
    assert prefill_tokens(StepPlan(), small) == 20
    assert prefill_tokens(StepPlan((Work(1, 1), Work(2, 1))), small) == 18
    assert prefill_tokens(StepPlan((Work(1, 1), Work(2, 1))), replace(LIMITS, step_tokens=1)) == 0
