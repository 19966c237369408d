"""Estimate the slope of a series of samples with Theil and Sen's estimator.

Single outliers hardly change it or its confidence interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEAST_SAMPLES = 8
"""Samples below which an interval says nothing."""


@dataclass(frozen=True)
class Trend:
    """Change per unit of time, and its confidence interval."""

    slope: float
    low: float
    high: float

    @property
    def rises(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0


def theil_sen(times: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> Trend:
    """Return the median slope between all pairs of samples, with Sen's interval.

    The interval (Sen 1968) is corrected for ties and for autocorrelation.

    Samples of a process resemble their neighbours, which makes Sen's interval too narrow: the
    variance is enlarged by (1 + r) / (1 - r), where r is the lag-one autocorrelation of what
    remains when the trend is taken away.

    Args:
        times: when the samples were taken, ascending, no two at once.
        values: one for each time.
        confidence: of the interval.

    Raises:
        ValueError: fewer than 8 samples, or as many times as values are not given.
    """
    if len(times) != len(values) or len(times) < LEAST_SAMPLES:
        raise ValueError(
            f"a trend needs {LEAST_SAMPLES} samples or more, and as many times: {len(values)} samples, {len(times)} times"
        )
    t, v = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(t), 1)
    slopes = np.sort((v[second] - v[first]) / (t[second] - t[first]))
    slope = float(np.median(slopes))
    n = len(t)
    _, ties = np.unique(v, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))) / 18
    variance *= _inflation(v - slope * t)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(max(0.0, variance))
    low = max(0, math.floor((len(slopes) - half) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + half) / 2))
    return Trend(slope, float(slopes[low]), float(slopes[high]))


def _inflation(rest: np.ndarray) -> float:
    rest = rest - rest.mean()
    power = float(rest @ rest)
    if power <= 0:
        return 1.0
    r = min(0.99, max(0.0, float(rest[1:] @ rest[:-1]) / power))
    return (1 + r) / (1 - r)
