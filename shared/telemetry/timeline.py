"""Phases that one process measures, and phases that others report, on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.contracts.phases import Phase, PhaseSpan

Clock = Callable[[], float]


@dataclass(frozen=True)
class MeasuredPhase:
    """A phase on the local monotonic clock, in seconds.

    Attributes:
        end: None while the phase lasts.
    """

    phase: Phase
    start: float
    end: float | None = None
    process: str = ""
    detail: dict[str, str | int | float] = field(default_factory=dict)


class Timeline:
    """Phases on this process's monotonic clock.

    A message carries spans relative to its own sending (`spans()`: start_ms ≤ 0); its receiver
    places them at `now + start_ms` on its own clock (`absorb()`). The only error is the message's
    flight, and no two hosts' clocks are ever compared.
    """

    def __init__(self, process: str, clock: Clock = time.monotonic) -> None:
        self.process = process
        self._clock = clock
        self._closed: list[MeasuredPhase] = []
        self._open: dict[Phase, MeasuredPhase] = {}

    @contextmanager
    def phase(self, phase: Phase, **detail: str | int | float) -> Iterator[None]:
        self.begin(phase, **detail)
        try:
            yield
        finally:
            self.end(phase)

    def begin(self, phase: Phase, **detail: str | int | float) -> None:
        self._open[phase] = MeasuredPhase(phase, self._clock(), None, self.process, detail)

    def end(self, phase: Phase, **detail: str | int | float) -> None:
        """Close `phase`; harmless if it is not open."""
        started = self._open.pop(phase, None)
        if started is not None:
            self.add(phase, started.start, self._clock(), **{**started.detail, **detail})

    def add(self, phase: Phase, start: float, end: float, **detail: str | int | float) -> None:
        """Add a finished phase.

        Args:
            start: Seconds of the local monotonic clock.
            end: Seconds of the local monotonic clock.
        """
        self._closed.append(MeasuredPhase(phase, start, max(start, end), self.process, detail))

    def absorb(self, spans: Iterable[PhaseSpan], received: float | None = None) -> None:
        """Add the spans of a received message.

        Their times are relative to the sending of the message, which is taken to be its receipt.
        """
        base = self._clock() if received is None else received
        self._closed.extend(
            MeasuredPhase(s.phase, base + s.start_ms / 1e3, base + s.end_ms / 1e3, s.process, dict(s.detail)) for s in spans
        )

    def spans(self, origin: float | None = None) -> tuple[PhaseSpan, ...]:
        """Return all closed phases, with `start_ms` relative to `origin`.

        The default of `origin` is now, the time the message is sent.
        """
        base = self._clock() if origin is None else origin
        return tuple(
            PhaseSpan(
                phase=m.phase,
                start_ms=(m.start - base) * 1e3,
                duration_ms=((m.end or m.start) - m.start) * 1e3,
                process=m.process,
                detail=m.detail,
            )
            for m in sorted(self._closed, key=lambda m: m.start)
        )
