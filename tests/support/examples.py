"""How many examples property tests have: a share of those that `make test-long` runs."""

from __future__ import annotations

import os

PERCENT = int(os.environ.get("THAW_TEST_EXAMPLES", "30"))
"""Share of the examples. Each run has the same ones, so most of them find nothing new."""
_LEAST = 10


def examples(full: int) -> int:
    """Return the `max_examples` of a test that has `full` of them in `make test-long`."""
    return max(min(full, _LEAST), full * PERCENT // 100)
