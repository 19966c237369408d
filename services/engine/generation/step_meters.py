"""The seconds of a batcher's steps, for the engine's status and for its page of meters."""

from __future__ import annotations

from collections.abc import Mapping

from services.engine.domain.step_costs import StepCosts
from shared.engines.background_seconds import OWN
from shared.engines.charge_page import ChargePage


class StepMeters:
    """Meters that the computing thread writes, and other threads may read.

    Attributes:
        busy_s: Seconds of all steps that computed something or had requests.
        background_s: The part of them that is charged to no request, by its cause.
        closed_s: The part of ended requests (`StepCosts`).
    """

    def __init__(self, costs: StepCosts) -> None:
        self.busy_s = 0.0
        self.closed_s = 0.0
        self.background_s: Mapping[str, float] = {}
        self._costs = costs
        self._page: ChargePage | None = None
        self._began = 0.0

    def keep_in(self, page: ChargePage) -> None:
        """Write the meters to a page after each step. Call it before the first step."""
        self._page = page

    def begin(self, now: float) -> None:
        """A step begins; times are in seconds of one clock."""
        self._began = now
        self._costs.begin(now)

    def record_results(self, now: float) -> None:
        """Write the costs of a step to the page, before a gateway receives its results."""
        self._write(self.busy_s + now - self._began)

    def end(self, now: float, *, has_results: bool, has_more: bool) -> None:
        """The step ends.

        Args:
            now: The present time.
            has_results: The step had results.
            has_more: Requests are left.
        """
        is_charged = self._costs.end(now, has_more=has_more)
        if has_results or has_more or is_charged:
            self.busy_s += now - self._began
            self._write(self.busy_s)
        self.closed_s = self._costs.closed_s
        if self._costs.background_s != self.background_s:
            self.background_s = dict(self._costs.background_s)  # other threads read it

    def _write(self, busy_s: float) -> None:
        if self._page is not None:
            self._page.write_steps(busy_s, self._costs.charged_s, self._costs.background_s.get(OWN, 0.0))
