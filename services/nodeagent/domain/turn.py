"""One decision in the making: the state so far and the effects so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.nodeagent.domain.events import Effect, Forget, Persist, Publish, Reply
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState
from shared.errors import ThawError


class Turn:
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
        """Put a changed instance that is worth keeping: recorded and told at once."""
        changed = self.put(instance.model_copy(update=update))
        self.emit(Persist(instance.instance_id), Publish())
        return changed

    def drop(self, instance_id: str) -> None:
        self.state = replace(self.state, instances={k: i for k, i in self.state.instances.items() if k != instance_id})
        self.emit(Forget(instance_id), Publish())

    def books(self, ledger: Ledger) -> None:
        self.state = replace(self.state, ledger=ledger)

    def reply(self, reply: int, error: ThawError | None = None) -> None:
        self.emit(Reply(reply, error.body() if error is not None else None))
