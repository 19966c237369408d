"""Find the ticks that change nothing, so that a simulation need not decide them.

The live scheduler decides each of them. A week without requests has more than half a million.
"""

from __future__ import annotations

from services.scheduler.domain.busy import is_busy, is_node_lost_soon
from services.scheduler.domain.decide import Decision
from services.scheduler.domain.events import Event, Tick
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.expectations import are_expectations_due
from services.scheduler.domain.prewarm.prefetch import next_prefetch_at
from services.scheduler.domain.state.changes import Put
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.volatile import SloQueue

_ROUNDING_S = 1e-6
"""What is due within this time counts as due: sums and differences of times are rounded."""


class IdleTicks:
    """The ticks since the last decision that changed anything.

    A tick that follows one without effects repeats it, unless something is due by now. `decide` is
    a pure function of the state, which only other decisions change, and of the time.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._is_settled = False
        self._prefetch_at: float | None = None
        """Time of the next prefetch; None: not computed for this state."""

    def record(self, event: Event, decision: Decision) -> None:
        """Take note of a decision."""
        self._is_settled = isinstance(event, Tick) and not decision.effects and all(map(_is_of_slo_queue, decision.changes))
        self._prefetch_at = None

    def changes_nothing(self, state: ClusterState, now: float) -> bool:
        """True if a tick now has no effect and changes nothing."""
        if not self._is_settled:
            return False
        if self._prefetch_at is None:
            self._prefetch_at = next_prefetch_at(state, now, self._policy)
        return (
            now < self._prefetch_at
            and not is_busy(state, now, self._policy, _ROUNDING_S)
            and not is_node_lost_soon(state, now, self._policy, _ROUNDING_S)
            and not are_expectations_due(state, now)
        )


def _is_of_slo_queue(change: object) -> bool:
    """True for the change of alpha at the end of a period; `is_busy` finds the next one."""
    return isinstance(change, Put) and isinstance(change.entity, SloQueue)
