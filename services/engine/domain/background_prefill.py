"""Keys and values that are computed ahead of a request that is to come from another engine: what they may take of memory and of a step.

1. They never take from requests that run or wait here: a sequence set is taken on only if it fits beside all that those are known to need,
   and is let go of when they come to need more.
2. They are computed behind what runs: in a step in which no prompt of a request is under way, a part of a chunk beside the decoding
   sequences; a whole chunk where nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.engine.domain.step_planning import Limits, SequenceView, StepPlan, blocks_for

_SHARE = 8
"""Beside decoding sequences, one part in so many of the chunk that a request's prompt would get: 32 of 256 tokens. So few cost each what 64 at once
cost (60M parameters, one core, beside four decoding sequences: 0.7 to 0.9 ms), 8 at once a quarter more."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    both = min(len(a), len(b))
    if a[:both] == b[:both]:
        return both
    return next(i for i in range(both) if a[i] != b[i])


def room(running: Iterable[SequenceView], waiting: Iterable[SequenceView], limits: Limits) -> int:
    """Rule 1: blocks that no request here is known to need; each keeps one to grow into."""
    return limits.kv_blocks - sum(blocks_for(s.length) + 1 for s in (*running, *waiting))


def excess(after: Iterable[SequenceView], ahead: int, limits: Limits) -> int:
    """Rule 1: blocks of the `ahead` ones that the sequences that run (as they are `after` the step) need."""
    return max(0, sum(blocks_for(s.computed) for s in after) + ahead - limits.kv_blocks)


def share(plan: StepPlan, limits: Limits) -> int:
    """Rule 2: tokens that a step may compute ahead."""
    if any(work.count > 1 for work in plan.work):
        return 0
    return max(1, limits.chunk_tokens // _SHARE) if plan.work else limits.chunk_tokens
