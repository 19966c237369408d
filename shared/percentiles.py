"""Percentiles by the nearest rank: each percentile is one of the values.

The p-th percentile of n values in ascending order is the one at rank ceil(n * p / 100), from 1 on:
the smallest value that at least p percent of the values do not exceed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar, overload

Default = TypeVar("Default")


def nearest_rank(count: int, percent: float) -> int:
    """Return the rank of a percentile among `count` values in ascending order, from 1 on.

    Args:
        count: Number of values, at least 1.
        percent: From 0 (the least value) to 100 (the greatest).
    """
    return max(1, math.ceil(count * percent / 100))


@overload
def percentile(values: Iterable[float], percent: float) -> float: ...
@overload
def percentile(values: Iterable[float], percent: float, *, default: Default) -> float | Default: ...
def percentile(values: Iterable[float], percent: float, *, default: object = math.nan) -> object:
    """Return a percentile of values in any order.

    Args:
        values: The values.
        percent: From 0 (the least value) to 100 (the greatest).
        default: The result without values.
    """
    ordered = sorted(values)
    return ordered[nearest_rank(len(ordered), percent) - 1] if ordered else default
