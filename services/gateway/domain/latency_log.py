"""Latencies of each model's requests in the last hour, by minute, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.latencies import (
    BINS_PER_DOUBLING,
    HISTORY_MINUTES,
    MAX_BIN,
    LatenciesViewed,
    LatencyHistory,
    LatencyPoint,
    MinuteLatencies,
    TtftSummary,
)
from shared.contracts.phases import Phase
from shared.contracts.traces import RequestTrace

MAX_ENTRIES = 200_000
"""Bins and phases of all models and minutes together; beyond it the oldest minutes are dropped."""
_ENTRIES_OF_MINUTE = 8
"""What a minute of a model takes besides, in memory of so many entries."""
_MINUTE_S = 60


def bin_of(ttft_ms: float) -> int:
    """Return the bin of a time to the first token."""
    return min(MAX_BIN, math.floor(BINS_PER_DOUBLING * math.log2(ttft_ms))) if ttft_ms > 1.0 else 0


@dataclass(slots=True)
class _Minute:
    warm: dict[int, int] = field(default_factory=dict)
    cold: dict[int, int] = field(default_factory=dict)
    judged: int = 0
    met: int = 0
    phases_ms: dict[Phase, float] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        return _ENTRIES_OF_MINUTE + len(self.warm) + len(self.cold) + len(self.phases_ms)


class LatencyLog:
    """Count the requests of one gateway.

    Args:
        since: The present minute, in minutes since 1970.
        max_entries: Bound of the memory; an entry takes about a hundred bytes.
    """

    def __init__(self, since: int, max_entries: int = MAX_ENTRIES) -> None:
        self._since = since
        self._max_entries = max_entries
        self._minutes: OrderedDict[tuple[int, str], _Minute] = OrderedDict()
        self._entries = 0

    @property
    def entries(self) -> int:
        """Bins, phases and minutes that are stored."""
        return self._entries

    def record(self, trace: RequestTrace, is_met: bool | None, minute: int) -> None:
        """Count a finished request.

        Args:
            is_met: It met its model's objective; None: it does not count.
            minute: The present minute, in minutes since 1970.
        """
        if trace.ttft_ms is None and is_met is None:
            return
        found = self._minutes.get((minute, trace.model))
        if found is None:
            self._expire(minute)
            found = self._minutes[minute, trace.model] = _Minute()
            self._entries += found.entries
        before = found.entries
        if is_met is not None:
            found.judged += 1
            found.met += is_met
        if trace.ttft_ms is not None:
            bins = found.cold if trace.cold else found.warm
            number = bin_of(trace.ttft_ms)
            bins[number] = bins.get(number, 0) + 1
            if trace.cold:
                for segment in trace.critical_path:
                    found.phases_ms[segment.phase] = found.phases_ms.get(segment.phase, 0.0) + segment.duration_ms
        self._entries += found.entries - before
        while self._entries > self._max_entries and len(self._minutes) > 1:
            self._drop_oldest()

    def view(self, model: str, minute: int) -> tuple[int, tuple[MinuteLatencies, ...]]:
        """Return the first minute that is complete, and the counts of a model in the last hour."""
        self._expire(minute)
        found = tuple(
            MinuteLatencies(minute=m, warm=dict(c.warm), cold=dict(c.cold), judged=c.judged, met=c.met, phases_ms=dict(c.phases_ms))
            for m in range(minute - HISTORY_MINUTES, minute + 1)
            if (c := self._minutes.get((m, model))) is not None
        )
        return self._since, found

    def _expire(self, minute: int) -> None:
        """Drop what is older than an hour."""
        while self._minutes and next(iter(self._minutes))[0] < minute - HISTORY_MINUTES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (minute, _), dropped = self._minutes.popitem(last=False)
        self._entries -= dropped.entries
        self._since = max(self._since, minute + 1)


def summarize_history(model: str, views: Sequence[LatenciesViewed], minute: int, step: int) -> LatencyHistory:
    """Add up what gateways have of a model.

    Args:
        views: One for each gateway.
        minute: The present minute, in minutes since 1970.
        step: Minutes of a point of the history; it divides an hour.
    """
    last = minute // step
    first = last - HISTORY_MINUTES // step + 1
    by_point: dict[int, list[MinuteLatencies]] = {n: [] for n in range(first, last + 1)}
    for view in views:
        for counted in view.minutes:
            if counted.minute // step in by_point:
                by_point[counted.minute // step].append(counted)
    return LatencyHistory(
        model=model,
        step_s=step * _MINUTE_S,
        since=max((v.since for v in views), default=minute) * _MINUTE_S,
        gateways=len(views),
        points=tuple(_summarize(n * step * _MINUTE_S, counted) for n, counted in by_point.items()),
        whole=_summarize(first * step * _MINUTE_S, [m for counted in by_point.values() for m in counted]),
    )


def _summarize(at: int, counted: Sequence[MinuteLatencies]) -> LatencyPoint:
    cold = _summarize_ttft(m.cold for m in counted)
    sums: dict[Phase, float] = {}
    for m in counted:
        for phase, ms in m.phases_ms.items():
            sums[phase] = sums.get(phase, 0.0) + ms
    return LatencyPoint(
        at=at,
        warm=_summarize_ttft(m.warm for m in counted),
        cold=cold,
        judged=sum(m.judged for m in counted),
        met=sum(m.met for m in counted),
        phases_ms={phase: round(ms / cold.requests, 1) for phase, ms in sums.items()} if cold.requests else {},
    )


def _summarize_ttft(histograms: Iterable[dict[int, int]]) -> TtftSummary:
    merged: dict[int, int] = {}
    for bins in histograms:
        for number, count in bins.items():
            merged[number] = merged.get(number, 0) + count
    total = sum(merged.values())
    return TtftSummary(requests=total, p50_ms=_percentile(merged, total, 0.5), p99_ms=_percentile(merged, total, 0.99))


def _percentile(bins: dict[int, int], total: int, share: float) -> float | None:
    """Return the nearest-rank percentile, as the middle of its bin."""
    rank = math.ceil(share * total)
    reached = 0
    for number in sorted(bins):
        reached += bins[number]
        if reached >= rank:
            return float(round(math.exp2((number + 0.5) / BINS_PER_DOUBLING), 2))
    return None
