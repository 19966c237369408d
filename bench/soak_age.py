"""Compare a mesh that has served for hours with a new one, request by request.

The p99 of an hour on a machine that other work shares says little about the mesh: the load of the
machine changes it more than age can. Both meshes therefore get the same requests at the same time
of day: each request of the deck (bench/soak_load.py) goes to one mesh and, when that has responded,
to the other, the first of the two drawn at random. The ratio of their percentiles stands with its
95 % interval from a bootstrap over whole decks, because requests of one deck depend on each other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.soak_load import ADAPTER, AGAIN, CANCELLED, DECK, STREAMED, SWAP, Load, SentRequest
from shared.percentiles import nearest_rank, percentile

WARM_UP_DECKS = 5
"""Decks sent before the comparison: a new mesh starts its engines and imports modules meanwhile."""
_RESAMPLES = 2000
_KINDS = {"warm": (STREAMED, AGAIN, CANCELLED, ADAPTER), "cold": (SWAP,)}


@dataclass(frozen=True)
class Ratio:
    """A percentile of the old mesh over that of the new one, with its 95 % confidence interval."""

    name: str
    requests: int
    old_ms: float
    new_ms: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Pair:
    """The same request to both meshes.

    Attributes:
        deck: Number of the deal that it belongs to.
    """

    deck: int
    kind: str
    old: SentRequest
    new: SentRequest


async def compare(old: Load, new: Load, seconds: float, seed: int = 0) -> list[Pair]:
    """Send the same requests to both meshes in turn, for so many seconds after a warm-up.

    Args:
        old: the load of the mesh that has served for long.
        new: the load of the new mesh.
        seconds: duration of the comparison, s.
        seed: of the order within each pair.
    """
    order = random.Random(seed)
    pairs: list[Pair] = []
    deadline = float("inf")
    number = 0
    while time.monotonic() < deadline:
        if number == WARM_UP_DECKS * len(DECK):
            deadline = time.monotonic() + seconds
        is_old_first = order.random() < 0.5
        first, second = (old, new) if is_old_first else (new, old)
        results = [await first.send_next(), await second.send_next()]
        if number >= WARM_UP_DECKS * len(DECK):
            old_sent, new_sent = results if is_old_first else reversed(results)
            pairs.append(Pair(number // len(DECK), old_sent.kind, old_sent, new_sent))
        number += 1
    return pairs


def ratios(pairs: Sequence[Pair], percents: Sequence[float] = (50, 99), seed: int = 0) -> list[Ratio]:
    """Return the ratios of the percentiles of time to first token, of warm and of cold requests."""
    found = []
    for name, kinds in _KINDS.items():
        decks: dict[int, list[tuple[float, float]]] = {}
        for pair in pairs:
            if pair.kind in kinds and pair.old.ttft_ms is not None and pair.new.ttft_ms is not None:
                decks.setdefault(pair.deck, []).append((pair.old.ttft_ms, pair.new.ttft_ms))
        samples = [np.array(deck) for deck in decks.values()]
        if not samples:
            continue
        draws = _resample(samples, np.random.default_rng(seed))
        whole = np.concatenate(samples)
        for percent in percents:
            old_ms, new_ms = _percentiles(whole, percent)
            resampled = [old / new for old, new in (_percentiles(draw, percent) for draw in draws)]
            low, high = percentile(resampled, 2.5), percentile(resampled, 97.5)
            found.append(Ratio(f"{name} p{percent:g}", len(whole), old_ms, new_ms, old_ms / new_ms, low, high))
    return found


def _percentiles(pairs: NDArray[np.float64], percent: float) -> tuple[float, float]:
    """Return the percentile of the first and of the second value of the pairs."""
    index = nearest_rank(len(pairs), percent) - 1
    old, new = np.partition(pairs, index, axis=0)[index]
    return float(old), float(new)


def _resample(decks: list[NDArray[np.float64]], generator: np.random.Generator) -> list[NDArray[np.float64]]:
    return [np.concatenate([decks[i] for i in generator.integers(len(decks), size=len(decks))]) for _ in range(_RESAMPLES)]
