"""A state transition in progress: the state and the effects so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.nodeagent.domain.ended_engines import add_ended
from services.nodeagent.domain.events import Effect, Forget, Persist, Publish, Reply
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.reservations import Reservation, blocking_reservation
from services.nodeagent.domain.state import Instance, NodeState, Process
from shared.contracts.node import InstanceState
from shared.errors import InsufficientMemory, ThawError

_STARTING = (InstanceState.PREPARING, InstanceState.LOADING)


class Transition:
    """Collects the changes of one decision."""

    def __init__(self, state: NodeState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[Effect] = []

    def emit(self, *effects: Effect) -> None:
        self.effects += effects

    def find(self, instance_id: str) -> Instance | None:
        return self.state.instances.get(instance_id)

    def put(self, instance: Instance) -> Instance:
        self.state = replace(self.state, instances={**self.state.instances, instance.instance_id: instance})
        return instance

    def change(self, instance: Instance, **update: Any) -> Instance:
        """Store a changed instance, write its record and publish the status."""
        changed = self.put(instance.model_copy(update=update))
        self.emit(Persist(instance.instance_id), Publish(urgent=not _is_attaching(changed)))
        return changed

    def park(self, instance: Instance, **update: Any) -> Instance:
        """Change fields of an instance's suspend state, as `change` does."""
        return self.change(instance, suspend_state=instance.suspend_state.model_copy(update=update))

    def drop(self, instance_id: str) -> None:
        self.state = replace(self.state, instances={k: i for k, i in self.state.instances.items() if k != instance_id})
        self.emit(Forget(instance_id), Publish())

    def note_ended(self, instance: Instance) -> None:
        """Keep the last meters of an instance's process, which has ended."""
        self.state = replace(self.state, ended_engines=add_ended(self.state.ended_engines, instance, self.now))

    def set_ledger(self, ledger: Ledger) -> None:
        self.state = replace(self.state, ledger=ledger)

    def reserve(self, r: Reservation) -> ThawError | None:
        """Book a reservation without waiting. None: it is booked; else the error."""
        refusal = self.state.ledger.refusal(r.device_ids, r.nbytes, r.instance_id, r.weights)
        if refusal is not None:
            return refusal
        first = blocking_reservation(self.state.queue, r.device_ids)
        if first is not None:
            return InsufficientMemory(
                f"{first.instance_id} has waited longest for memory on {', '.join(first.device_ids)} and goes first",
                should_retry=True,
            )
        # This overtakes waiting reservations, and counts as such.
        passed = tuple(replace(q, passed=q.passed + 1) if set(q.device_ids) & set(r.device_ids) else q for q in self.state.queue)
        self.state = replace(
            self.state, queue=passed, ledger=self.state.ledger.book(r.instance_id, r.device_ids, r.nbytes, r.weights)
        )
        return None

    def enqueue(self, r: Reservation) -> None:
        self.state = replace(self.state, queue=(*self.state.queue, r))

    def dequeue(self, instance_id: str) -> None:
        """Drop the reservation that an instance waits for."""
        self.state = replace(self.state, queue=tuple(r for r in self.state.queue if r.instance_id != instance_id))

    def reply(self, reply: int, error: ThawError | None = None) -> None:
        self.emit(Reply(reply, error.body() if error is not None else None))


def _is_attaching(instance: Instance) -> bool:
    """True if an instance joins an executor, and nothing has gone wrong.

    That takes less time than to publish its steps. What requests wait for is published at once.
    """
    has_process = instance.process in (Process.FORKING, Process.ALIVE)
    return instance.is_shared and instance.state in _STARTING and has_process and not instance.stop_asked
