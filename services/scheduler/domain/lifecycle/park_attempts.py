"""Starts that only park a model, and the record of those that failed."""

from __future__ import annotations

from typing import Literal

from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import ParkFailures

TRIGGER = "park"


def is_parking(i: Instance) -> bool:
    """True if the instance was started to be parked and is not suspended yet."""
    return i.trigger == TRIGGER and not i.state.parked


def record_park_failure(tx: Transaction, name: str, reason: str, *, hopeless: bool = False) -> None:
    """Record that parking failed; it is retried a few times with back-off."""
    model, known = tx.state.models.get(name), tx.state.park_failures.get(name)
    if model is None or not model.card.spec.park:
        return
    in_a_row = known is not None and tx.now - known.failed_at < tx.policy.park_failure_window_s
    tries = known.attempts + 1 if known is not None and in_a_row else 1
    final: Literal["", "failed"] = "failed" if hopeless or tries >= tx.policy.park_max_attempts else ""
    tx.put(ParkFailures(name, tries, tx.now, tx.now + tx.policy.backoff_s(tries), reason, final))


def record_park_impossible(tx: Transaction, name: str, reason: str) -> None:
    """Record that suspending the model's engine is impossible or useless."""
    tx.put(ParkFailures(name, 0, tx.now, tx.now, reason, "impossible"))
