"""Compute the critical path of overlapping phases: a tiling of a time interval."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.traces import CriticalSegment

_EPSILON_MS = 1e-6


def critical_path(
    spans: Iterable[PhaseSpan], start_ms: float, end_ms: float, *, before: Phase = Phase.QUEUE, gap: Phase = Phase.MESH
) -> tuple[CriticalSegment, ...]:
    """Tile [start_ms, end_ms] with the phases waited for, without gap or overlap.

    The function walks back from the end: the phase that finished last was waited for, back to its
    own start; then the phase that had finished last before that. An instant that no span covers is
    `gap` (messages under way), or `before` ahead of the first span. Spans are clipped to the
    interval, so a request that joined a load half-way is charged only for the half it waited.
    """
    clipped = [
        (max(s.start_ms, start_ms), min(s.end_ms, end_ms), s.phase)
        for s in spans
        if s.end_ms > start_ms and s.start_ms < end_ms and s.duration_ms > 0
    ]
    segments: list[CriticalSegment] = []
    at = end_ms
    while at - start_ms > _EPSILON_MS:
        earlier = [c for c in clipped if c[0] < at - _EPSILON_MS]
        if not earlier:
            segments.append(_segment(before if clipped or not segments else gap, start_ms, at))
            break
        # Of those that reach `at`, the one that ended first after it enabled what follows; a longer
        # one wins a tie.
        reaching = [c for c in earlier if c[1] >= at - _EPSILON_MS]
        if reaching:
            start, _, phase = min(reaching, key=lambda c: (c[1], c[0]))
        else:
            start, phase = max(c[1] for c in earlier), gap
        if start - start_ms <= _EPSILON_MS:
            start = start_ms
        segments.append(_segment(phase, start, at))
        at = start
    return tuple(_merge(reversed(segments)))


def _segment(phase: Phase, start: float, end: float) -> CriticalSegment:
    return CriticalSegment(phase=phase, start_ms=start, duration_ms=end - start)


def _merge(segments: Iterable[CriticalSegment]) -> Iterable[CriticalSegment]:
    last: CriticalSegment | None = None
    for segment in segments:
        if last is not None and last.phase == segment.phase:
            last = _segment(last.phase, last.start_ms, segment.start_ms + segment.duration_ms)
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last
