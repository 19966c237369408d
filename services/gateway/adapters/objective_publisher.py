"""Publication of how many requests met their model's objective."""

from __future__ import annotations

import asyncio
import logging
import time

from services.gateway.domain.objectives import ObjectiveCounter
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.objectives import REPORT_INTERVAL_S, ObjectiveStanding
from shared.errors import ThawError, Unreachable
from shared.messaging import Mesh

log = logging.getLogger(__name__)


class ObjectivePublisher:
    """Send the counts to the scheduler every few seconds, if there are any."""

    def __init__(self, mesh: Mesh, counter: ObjectiveCounter) -> None:
        self._mesh = mesh
        self._counter = counter
        self._has_counts = asyncio.Event()

    def count(self, model: str, *, is_met: bool) -> None:
        self._counter.count(model, is_met=is_met)
        self._has_counts.set()

    def standing(self, model: str) -> ObjectiveStanding | None:
        return self._counter.standing(model)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._has_counts.wait()
            await asyncio.sleep(REPORT_INTERVAL_S)
            if await self.flush():
                self._has_counts.clear()

    async def flush(self) -> bool:
        """Send all counts; return False if the scheduler has not acknowledged all of them."""
        while (report := self._counter.next_report(time.monotonic())) is not None:
            try:
                await self._mesh.request(subjects.OBJECTIVES, report, Done)
            except Unreachable:
                return False  # no leader now; the next attempt sends the same report
            except ThawError as e:
                log.warning("scheduler refused a report of objectives", extra={"error": e.message})
                return False
            self._counter.acknowledge(report.number)
        return True
