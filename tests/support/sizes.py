"""Sizes of tests: small ones in `make test`, and all that a test can have in `make test-long`."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
ARE_FULL = "THAW_TEST_FULL_SIZES" in os.environ


def size(usual: T, full: T) -> T:
    """Return a size that costs little, or the full one in `make test-long`."""
    return full if ARE_FULL else usual
