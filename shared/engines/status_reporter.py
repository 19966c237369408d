"""Publishes an instance's status on every change and once a second."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from nats.errors import Error as NatsError

from shared.contracts import subjects
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad, EngineReport, EngineStart, EngineState, HostedEngine
from shared.contracts.phases import Phase
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline

INTERVAL_S = 1.0
PROGRESS_S = 0.05
"""Seconds that a change of progress alone may wait. A short start is not slowed down by reports of
its steps.
"""


class StatusReporter:
    """Holds the published state of the engine.

    `notify_changed` may be called often: simultaneous changes produce one report. Used on the event
    loop.
    """

    def __init__(
        self, mesh: Mesh, start: EngineStart, timeline: Timeline, load: Callable[[], EngineLoad], *, begins_at_once: bool = True
    ) -> None:
        """Create a reporter of an instance that loads.

        Args:
            mesh: The connection.
            start: The instance.
            timeline: The phases of its start.
            load: Returns the load of its requests.
            begins_at_once: The first report is sent at once, and does not wait for a change.
        """
        self._mesh = mesh
        self._start = start
        self._timeline = timeline
        self._load = load
        self._begins_at_once = begins_at_once
        self._changed = asyncio.Event()
        self._progress_due: asyncio.TimerHandle | None = None
        self.state: EngineState = "loading"
        self.phase: Phase | None = Phase.INIT
        self.progress = 0.0
        self.error: ErrorBody | None = None
        self.weights_id: str | None = None
        self.accepts_requests = False
        self.hosted: Callable[[], HostedEngine | None] = lambda: None
        self.fell_back: ErrorBody | None = None

    def notify_changed(self) -> None:
        self._changed.set()

    def enter(self, state: EngineState, *, phase: Phase | None = None, error: ErrorBody | None = None) -> None:
        self.state, self.phase, self.error = state, phase, error
        if state == "ready":
            self.progress = 1.0
        self.notify_changed()

    def advance(self, progress: float, phase: Phase) -> None:
        """Raise the progress of the start. Progress never falls."""
        if self.state == "loading" and (progress > self.progress or phase is not self.phase):
            self.progress, self.phase = max(self.progress, min(progress, 1.0)), phase
            if self._progress_due is None:
                self._progress_due = asyncio.get_running_loop().call_later(PROGRESS_S, self.notify_changed)

    def accept_requests(self) -> None:
        """Report that the engine takes requests while it loads."""
        self.accepts_requests = True
        self.notify_changed()

    def report(self) -> EngineReport:
        return EngineReport(
            instance_id=self._start.instance_id,
            pid=os.getpid(),
            state=self.state,
            phase=self.phase,
            progress=self.progress,
            load=self._load(),
            phases=self._timeline.spans(),
            error=self.error,
            weights_id=self.weights_id,
            accepts_requests=self.accepts_requests and self.state == "loading",
            hosted=self.hosted(),
            fell_back=self.fell_back,
        )

    async def publish(self) -> None:
        try:
            await self._mesh.publish(subjects.engine_report(self._start.node), self.report())
        except NatsError:
            return  # the next report carries the same state

    async def publish_forever(self) -> None:
        if not self._begins_at_once:
            await self._wait_for_change(PROGRESS_S)
        while True:
            self._changed.clear()
            if self._progress_due is not None:
                self._progress_due.cancel()
                self._progress_due = None
            await self.publish()
            await self._wait_for_change(INTERVAL_S)

    async def _wait_for_change(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._changed.wait()
