"""Starts that only park a model, and the record of those that failed."""

from __future__ import annotations

from typing import Literal

from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import ParkTrouble

TRIGGER = "park"


def being_parked(i: Instance) -> bool:
    """Whether it was started to be parked and is not yet."""
    return i.trigger == TRIGGER and not i.state.parked


def failed(d: Draft, name: str, reason: str, *, hopeless: bool = False) -> None:
    """It could not be parked, or did not stay so: once more after a while, a few times."""
    model, known = d.state.models.get(name), d.state.park_trouble.get(name)
    if model is None or not model.card.spec.park:
        return
    in_a_row = known is not None and d.now - known.failed_at < d.policy.park_forgets
    tries = known.tries + 1 if known is not None and in_a_row else 1
    final: Literal["", "failed"] = "failed" if hopeless or tries >= d.policy.park_tries else ""
    d.put(ParkTrouble(name, tries, d.now, d.now + d.policy.backoff(tries), reason, final))


def useless(d: Draft, name: str, reason: str) -> None:
    """Its engine runs, and there is no use in suspending it, or no way to."""
    d.put(ParkTrouble(name, 0, d.now, d.now, reason, "impossible"))
