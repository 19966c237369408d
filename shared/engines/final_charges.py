"""The charges of an engine when its process ended."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.engine import BackgroundWork, EngineLoad

_OWN = ""


@dataclass(frozen=True, slots=True)
class FinalCharges:
    """The last meters of an ended engine, in seconds since its start.

    Attributes:
        busy_s: `EngineLoad.busy_s`.
        charged_s: The part that is charged to requests, open ones included.
        own_s: The part for no request that no plan caused.
    """

    busy_s: float
    charged_s: float
    own_s: float

    def apply_to(self, load: EngineLoad) -> EngineLoad:
        """Return the engine's last report with its last meters: all its requests have ended."""
        caused = tuple(work for work in load.background if work.plan_id != _OWN)
        own = (BackgroundWork(plan_id=_OWN, seconds=round(self.own_s, 6)),) if self.own_s > 0 else ()
        meters = {"busy_s": round(self.busy_s, 6), "charged_s": round(self.charged_s, 6), "background": (*caused, *own)}
        return load.model_copy(update=meters)
