"""The reservation queue: grants when bytes are free, drops at deadlines."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import process_exit, resuming, templates
from services.nodeagent.domain.reservations import Reservation, grant
from services.nodeagent.domain.state import Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.node import RESERVATION
from shared.errors import InsufficientMemory


def settle(transition: Transition) -> None:
    """Update the queue after every event.

    1. Drop expired reservations. 2. Grant those that fit, one at a time.
    """
    for r in [r for r in transition.state.queue if r.until <= transition.now]:  # 1
        transition.state = replace(transition.state, queue=tuple(q for q in transition.state.queue if q is not r))
        _give_up(transition, r)
    while transition.state.queue and not transition.state.stopping:  # 2
        granted, rest = grant(transition.state.queue, transition.state.ledger)
        if granted is None:
            return
        transition.state = replace(transition.state, queue=rest)
        transition.set_ledger(
            transition.state.ledger.book(granted.instance_id, granted.device_ids, granted.nbytes, granted.weights)
        )
        instance = transition.state.instances[granted.instance_id]
        if instance.process is Process.QUEUED:
            granted_now = {"process": Process.FORKING, "booked": True, "progress_at": transition.now, "phase": None}
            templates.begin(transition, instance.model_copy(update=granted_now))
        else:
            resuming.begin_resume(transition, instance, granted.device_ids)


def _give_up(transition: Transition, r: Reservation) -> None:
    """Drop an expired reservation.

    A start fails; a suspended instance stays suspended and reports the error.
    """
    instance = transition.find(r.instance_id)
    if instance is None:
        return
    waited = transition.now - r.since
    message = f"No memory was free within {waited:.1f} s on {', '.join(r.device_ids)}"
    error = InsufficientMemory(message, param=RESERVATION, should_retry=True).body()
    if instance.process is Process.QUEUED:
        process_exit.process_gone(transition, instance, error)
    elif instance.state.parked:
        transition.park(instance, no_memory_error=error)
