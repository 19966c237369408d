"""Division of a step into micro-batches, which stages compute at the same time.

A stage reads its weights once for each micro-batch. Steps of few tokens take the time of that read,
so dividing them would make them slower. Only large steps, which wait for arithmetic, are divided,
and never within a sequence: its tokens are computed in one pass, as by a single engine.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_TOKENS = 64
"""Minimum tokens of a micro-batch."""


def split_rows(counts: Sequence[int], stages: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches of a step: the first row and the end of each, in order.

    Args:
        counts: Tokens of each row.
        stages: Stages of the group; also the maximum number of micro-batches.
    """
    total = sum(counts)
    parts = max(1, min(stages, len(counts), total // LEAST_TOKENS))
    found: list[tuple[int, int]] = []
    first, tokens = 0, 0
    for row, count in enumerate(counts):
        tokens += count
        if len(found) + 1 < parts and tokens * parts >= total:
            found.append((first, row + 1))
            first, tokens = row + 1, 0
    if first < len(counts):
        found.append((first, len(counts)))
    return tuple(found)
