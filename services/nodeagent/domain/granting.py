"""Reservations that wait: granted when their bytes are free, given up when their time is over."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import process_exit, resuming
from services.nodeagent.domain.events import Fork
from services.nodeagent.domain.reservations import Reservation, grant
from services.nodeagent.domain.state import Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.node import RESERVATION
from shared.errors import InsufficientMemory


def settle(turn: Turn) -> None:
    """After every event: 1. what is over is given up, 2. what fits is granted, one after the other."""
    for r in [r for r in turn.state.queue if r.until <= turn.now]:  # 1
        turn.state = replace(turn.state, queue=tuple(q for q in turn.state.queue if q is not r))
        _give_up(turn, r)
    while turn.state.queue and not turn.state.stopping:  # 2
        granted, rest = grant(turn.state.queue, turn.state.ledger)
        if granted is None:
            return
        turn.state = replace(turn.state, queue=rest)
        turn.books(turn.state.ledger.book(granted.instance_id, granted.device_ids, granted.nbytes))
        instance = turn.state.instances[granted.instance_id]
        if instance.process is Process.QUEUED:
            turn.change(instance, process=Process.FORKING, booked=True, progress_at=turn.now, phase=None)
            turn.emit(Fork(instance.instance_id))
        else:
            resuming.begin_resume(turn, instance)


def _give_up(turn: Turn, r: Reservation) -> None:
    """A start has failed; what is suspended stays so, and says why."""
    instance = turn.find(r.instance_id)
    if instance is None:
        return
    waited = turn.now - r.since
    message = f"no room was free within {waited:.1f} s on {', '.join(r.device_ids)}"
    error = InsufficientMemory(message, param=RESERVATION, should_retry=True).body()
    if instance.process is Process.QUEUED:
        process_exit.process_gone(turn, instance, error)
    elif instance.state.parked:
        turn.park(instance, no_room=error)
