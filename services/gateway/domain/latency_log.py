"""Latencies of each model's requests in the last hour, by minute, in bounded memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.contracts.latencies import (
    BINS_PER_DOUBLING,
    HISTORY_MINUTES,
    MAX_BIN,
    MAX_PHASE_BIN,
    PHASE_UNITS_PER_MS,
    Bins,
    LatenciesViewed,
    LatencyHistory,
    LatencyPoint,
    MinuteLatencies,
    PhaseSummary,
    TtftSummary,
)
from shared.contracts.phases import Phase
from shared.contracts.traces import RequestTrace
from shared.percentiles import nearest_rank

MAX_ENTRIES = 200_000
"""Bins and phases of all models and minutes together; beyond it the oldest minutes are dropped."""
_ENTRIES_OF_MINUTE = 8
"""Fixed memory of a minute of a model, as a number of entries."""
_MINUTE_S = 60


def bin_of(ttft_ms: float) -> int:
    """Return the bin of a time to the first token."""
    return _bin_of(ttft_ms, MAX_BIN)


def phase_bin_of(phase_ms: float) -> int:
    """Return the bin of a phase's length."""
    return _bin_of(phase_ms * PHASE_UNITS_PER_MS, MAX_PHASE_BIN)


def _bin_of(units: float, last: int) -> int:
    return min(last, math.floor(BINS_PER_DOUBLING * math.log2(units))) if units > 1.0 else 0


@dataclass(slots=True)
class _Minute:
    """The fields of `MinuteLatencies`, mutable.

    Attributes:
        entries: Number of its bins and phases, for the bound of memory.
    """

    warm: Bins = field(default_factory=dict)
    cold: Bins = field(default_factory=dict)
    judged: int = 0
    met: int = 0
    phases_ms: dict[Phase, float] = field(default_factory=dict)
    warm_phases: dict[Phase, Bins] = field(default_factory=dict)
    cold_phases: dict[Phase, Bins] = field(default_factory=dict)
    entries: int = _ENTRIES_OF_MINUTE

    def judge(self, *, is_met: bool) -> None:
        self.judged += 1
        self.met += is_met

    def count(self, trace: RequestTrace, ttft_ms: float) -> None:
        """Count a request with a first token, and the phases until then."""
        self._count(self.cold if trace.cold else self.warm, bin_of(ttft_ms))
        by_phase = self.cold_phases if trace.cold else self.warm_phases
        for phase, ms in trace.phases_ms.items():
            bins = by_phase.get(phase)
            if bins is None:
                bins = by_phase[phase] = {}
                self.entries += 1
            self._count(bins, phase_bin_of(ms))
            if trace.cold:
                self.phases_ms[phase] = self.phases_ms.get(phase, 0.0) + ms

    def _count(self, bins: Bins, number: int) -> None:
        before = bins.get(number, 0)
        bins[number] = before + 1
        self.entries += not before

    def view(self, minute: int) -> MinuteLatencies:
        """Return a copy as a message has it."""
        return MinuteLatencies(
            minute=minute,
            warm=dict(self.warm),
            cold=dict(self.cold),
            judged=self.judged,
            met=self.met,
            phases_ms=dict(self.phases_ms),
            warm_phases={phase: dict(bins) for phase, bins in self.warm_phases.items()},
            cold_phases={phase: dict(bins) for phase, bins in self.cold_phases.items()},
        )


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
            found.judge(is_met=is_met)
        if trace.ttft_ms is not None:
            found.count(trace, trace.ttft_ms)
        self._entries += found.entries - before
        while self._entries > self._max_entries and len(self._minutes) > 1:
            self._drop_oldest()

    def view(self, model: str, minute: int) -> tuple[int, tuple[MinuteLatencies, ...]]:
        """Return the first minute that is complete, and the counts of a model in the last hour."""
        self._expire(minute)
        found = tuple(
            counted.view(m)
            for m in range(minute - HISTORY_MINUTES, minute + 1)
            if (counted := self._minutes.get((m, model))) is not None
        )
        return self._since, found

    def _expire(self, minute: int) -> None:
        """Drop minutes that are older than an hour."""
        while self._minutes and next(iter(self._minutes))[0] < minute - HISTORY_MINUTES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (minute, _), dropped = self._minutes.popitem(last=False)
        self._entries -= dropped.entries
        self._since = max(self._since, minute + 1)


def summarize_history(model: str, views: Sequence[LatenciesViewed], minute: int, step: int) -> LatencyHistory:
    """Add up the gateways' counts of a model.

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
        warm_phases=_summarize_phases(m.warm_phases for m in counted),
        cold_phases=_summarize_phases(m.cold_phases for m in counted),
    )


def _summarize_phases(minutes: Iterable[Mapping[Phase, Bins]]) -> dict[Phase, PhaseSummary]:
    by_phase: dict[Phase, list[Bins]] = {}
    for phases in minutes:
        for phase, bins in phases.items():
            by_phase.setdefault(phase, []).append(bins)
    return {phase: _summarize_phase(_merge(found)) for phase, found in by_phase.items()}


def _summarize_phase(bins: Bins) -> PhaseSummary:
    p50_ms, p99_ms = (round(_percentile(bins, percent) / PHASE_UNITS_PER_MS, 3) for percent in (50, 99))
    return PhaseSummary(requests=sum(bins.values()), p50_ms=p50_ms, p99_ms=p99_ms)


def _summarize_ttft(histograms: Iterable[Bins]) -> TtftSummary:
    bins = _merge(histograms)
    if not bins:
        return TtftSummary()
    p50_ms, p99_ms = (round(_percentile(bins, percent), 2) for percent in (50, 99))
    return TtftSummary(requests=sum(bins.values()), p50_ms=p50_ms, p99_ms=p99_ms)


def _merge(histograms: Iterable[Bins]) -> Bins:
    merged: Bins = {}
    for bins in histograms:
        for number, count in bins.items():
            merged[number] = merged.get(number, 0) + count
    return merged


def _percentile(bins: Bins, percent: float) -> float:
    """Return a percentile of bins that are not empty, as the middle of its bin."""
    rank = nearest_rank(sum(bins.values()), percent)
    reached = 0
    for number in sorted(bins):
        reached += bins[number]
        if reached >= rank:
            break
    return math.exp2((number + 0.5) / BINS_PER_DOUBLING)
