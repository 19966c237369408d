"""Recognise that no device can get room for a model, without examining every device.

On a large cluster whose instances all serve, each waiting model would otherwise have the instances
of every device described, several times a second, only to find that none of them may leave. An
upper bound of the room of any device is computed once for all models that wait; the shortlists
(shortlist.py) are followed to their end only for a model that needs no more than that.
"""

from __future__ import annotations

from services.scheduler.domain.demand.key_shares import Standing, may_interrupt
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.placement.request import PlacementRequest
from services.scheduler.domain.state.booking_index import BookingView
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import value
from shared.contracts.node import InstanceState


@value(frozen=True, slots=True)
class _Terms:
    """The properties of a request that decide which serving instances may leave for it."""

    is_extra: bool
    standing: Standing | None
    """None: its keys interrupt no others."""


def no_device_gets_room(tx: Transaction, r: PlacementRequest) -> bool:
    """Return True only if no single device can get room for the model, whatever the profile.

    Always False where units of weights are shared, since a model may then need less than its own
    bytes, and once serving instances may be drained for it.
    """
    if r.devices > 1 or r.may_preempt:
        return False
    bookings = tx.bookings()
    if bookings.has_separate_devices:
        return False
    interrupts = not r.ask.is_extra and r.ask.waited_s >= tx.policy.min_active_s
    terms = _Terms(r.ask.is_extra, r.standing if interrupts else None)
    return r.need_bytes > tx.memoize(("most room", terms), lambda: _most_room(tx, terms, bookings))


def _most_room(tx: Transaction, terms: _Terms, bookings: BookingView) -> int:
    """Return an upper bound of the bytes that a device has once all that may leave has left."""
    most = bookings.most_with_idle_gone()
    free = bookings.most_free()
    for name in tx.state.by_model:
        model = tx.state.models.get(name)
        if model is None or not (_may_migrate(tx, model, terms, free) or _may_be_drained(tx, model, terms)):
            continue
        for i in tx.state.of_model(name):
            for key in tx.state.devices_of(i):
                if (b := bookings.get(key)) is not None and not b.closed_reason:
                    most = max(most, b.free_soon_bytes + b.evictable_bytes)
    return most


def _may_migrate(tx: Transaction, model: Model, terms: _Terms, free: int) -> bool:
    """False only if the requests of its serving instances have no target (migration_targets.py)."""
    if terms.is_extra or not model.card.capabilities.token_resume:
        return False
    if "migrate" not in tx.policy.capabilities or "migrate" not in tx.policy.profile.uses:
        return False
    if model.card.stages or start_bytes(tx.state, model.card) <= free:
        return True
    return sum(1 for i in tx.state.live_instances(model) if i.state is InstanceState.READY) > 1


def _may_be_drained(tx: Transaction, model: Model, terms: _Terms) -> bool:
    """False only if the shares of keys do not allow it (victims.py), however soon it restarts."""
    return terms.standing is not None and may_interrupt(tx.state, terms.standing, model.key, reload_s=0.0)
