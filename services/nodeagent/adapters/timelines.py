"""Phases of starts, from the scheduler, this agent, and the engine."""

from __future__ import annotations

import time

from services.nodeagent.domain.state import Instance
from shared.contracts.engine import EngineReport
from shared.contracts.phases import Phase, PhaseSpan
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

_OURS = (Phase.RESERVE, Phase.CONTAINER, Phase.ATTACH)


class StartTimeline:
    """The phases of one start on the monotonic clock.

    `reserve` lasts from the command to the fork, `container` from the fork to the engine's first
    report. `attach` takes the place of `container` for an instance that joins a running executor,
    and lasts until the executor's answer.
    """

    def __init__(self, process: str) -> None:
        self._agent = Timeline(process)
        self._engine = Timeline("")
        self._has_reported = False
        self._complete = False

    def record_command(self, phases: tuple[PhaseSpan, ...], at: float) -> None:
        """The command arrived at time `at` (monotonic seconds), with the phases before it."""
        self._agent.absorb(phases, at)
        self._agent.begin(Phase.RESERVE)

    def forking(self, launcher: str) -> None:
        self._agent.end(Phase.RESERVE)
        self._agent.begin(Phase.CONTAINER, launcher=launcher)

    def attaching(self) -> None:
        """The instance joins a running executor."""
        self._agent.end(Phase.RESERVE)
        self._agent.begin(Phase.ATTACH)

    def end_attach(self) -> None:
        """The executor has answered."""
        self._agent.end(Phase.ATTACH)

    def record_report(self, report: EngineReport, traceparent: str | None) -> None:
        """Store the phases of a report. Those of the first `ready` report are final."""
        if not self._has_reported:
            self._has_reported = True
            self._agent.end(Phase.CONTAINER)
            self._agent.end(Phase.ATTACH)
            record_phases((s for s in self._agent.spans() if s.phase in _OURS), context_of(traceparent))
        if report.phases and not self._complete:
            self._engine = Timeline("")
            self._engine.absorb(report.phases)
            self._complete = report.state == "ready"

    def restoring(self, way: str) -> None:
        """Begin `restore`, which lasts until the resumed engine has answered a probe."""
        self._agent.end(Phase.RESERVE)
        self._agent.begin(Phase.RESTORE, way=way)

    def record_restored(self, traceparent: str | None) -> None:
        self._agent.end(Phase.RESTORE)
        record_phases((s for s in self._agent.spans() if s.phase in (Phase.RESERVE, Phase.RESTORE)), context_of(traceparent))

    def spans(self, origin: float | None = None) -> tuple[PhaseSpan, ...]:
        """All phases, relative to `origin` (default: now)."""
        base = time.monotonic() if origin is None else origin
        return tuple(sorted(self._agent.spans(base) + self._engine.spans(base), key=lambda s: s.start_ms))

    def restore(self, phases: tuple[PhaseSpan, ...]) -> None:
        """Take over `spans(origin=0)` of an earlier agent."""
        self._agent.absorb(phases, 0.0)
        self._has_reported = self._complete = True


class Timelines:
    """Timelines by instance."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._starts: dict[str, StartTimeline] = {}

    def get_timeline(self, instance_id: str) -> StartTimeline:
        return self._starts.setdefault(instance_id, StartTimeline(self._process))

    def renew(self, instance_id: str) -> StartTimeline:
        """Start a new timeline for a resume; the phases of the start are dropped."""
        self._starts.pop(instance_id, None)
        return self.get_timeline(instance_id)

    def spans(self, instance: Instance, origin: float | None = None) -> tuple[PhaseSpan, ...]:
        found = self._starts.get(instance.instance_id)
        return found.spans(origin) if found is not None else ()

    def forget(self, instance_id: str) -> None:
        self._starts.pop(instance_id, None)
