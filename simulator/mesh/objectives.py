"""Count the requests of a simulated gateway by their models' objectives, for the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from shared.contracts.objectives import MAX_MODELS_PER_REPORT, REPORT_INTERVAL_S, ObjectiveCounts, ReportObjectives
from simulator.clock import Clock
from simulator.instances import SimModel
from simulator.report import Served


class Objectives:
    """The counts since the last report.

    Args:
        clock: The clock of the simulation.
        send: Sends a report to the scheduler.
    """

    def __init__(self, clock: Clock, send: Callable[[ReportObjectives], None]) -> None:
        self._clock, self._send = clock, send
        self._counts: dict[str, tuple[int, int]] = {}
        """Requests, and those that met the objective, by model."""
        self._number = 0

    def count(self, model: SimModel, served: Served | None) -> None:
        """Count a request, unless its model has no objective.

        services/gateway/domain/objectives.py has the same rule.

        Args:
            model: The model of the request.
            served: Its result; None: it failed.
        """
        group = model.group
        if not group.has_ttft_objective and group.slo_tpot is None:
            return
        is_met = (
            served is not None
            and (served.in_time or not group.has_ttft_objective)
            and (group.slo_tpot is None or served.tpot <= group.slo_tpot)
        )
        if not self._counts:
            self._clock.call_later(REPORT_INTERVAL_S, self._report)
        total, met = self._counts.get(model.name, (0, 0))
        self._counts[model.name] = total + 1, met + is_met

    def _report(self) -> None:
        counts = tuple(ObjectiveCounts(model=name, total=total, met=met) for name, (total, met) in self._counts.items())
        self._counts.clear()
        for first in range(0, len(counts), MAX_MODELS_PER_REPORT):
            self._number += 1
            some = counts[first : first + MAX_MODELS_PER_REPORT]
            self._send(ReportObjectives(gateway="g", number=self._number, counts=some))
