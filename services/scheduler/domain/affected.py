"""The models, instances and devices that one decision examines.

A full scope covers the whole state. A changed scope covers what the transaction has changed:

- A model is affected by a change of its own entities, and of its instances and their migrations.
- An instance is affected by a report and by a change of its node.
- When a device gains free or reclaimable memory, every unschedulable model is affected.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.domain.state.changes import Put
from services.scheduler.domain.state.entities import Entity, Instance, Model, Node, key_of
from services.scheduler.domain.state.migrations import Migration
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import (
    FailureHistory,
    InstanceReport,
    ModelDemand,
    Overload,
    Presence,
    Unschedulable,
    Waiter,
)

_BY_MODEL: frozenset[type[Any]] = frozenset((Model, ModelDemand, Unschedulable, Overload, FailureHistory))


class FullScope:
    """The whole state, or only the instances that are due when nothing but time has passed."""

    def __init__(self, tx: Transaction, *, only_due: bool = False) -> None:
        self._tx = tx
        self._only_due = only_due

    def instances(self) -> list[Instance]:
        return self._tx.due_instances() if self._only_due else list(self._tx.state.instances.values())

    def list_claimed(self) -> list[tuple[str, str]]:
        return sorted(self._tx.state.claimed.values())

    def models(self) -> set[str]:
        state = self._tx.state
        return {
            *state.demand,
            *state.kept_running,
            *state.to_park,
            *state.unschedulable,
            *(w.model for w in state.waiters.values() if w.kind == "wake"),
        }


class ChangedScope:
    """The entities that the transaction has changed so far; each call includes newer changes."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._read = 0
        self._models: set[str] = set()
        self._nodes: set[str] = set()

    def instances(self) -> list[Instance]:
        self._look()
        state = self._tx.state
        found = {i.instance_id: i for node in sorted(self._nodes) for i in state.on_node(node)}
        found |= {i.instance_id: i for model in sorted(self._models) for i in state.of_model(model)}
        return list(found.values())

    def list_claimed(self) -> list[tuple[str, str]]:
        claimed = self._tx.state.claimed
        return sorted(claimed[key] for key in self._tx.changed_devices() if key in claimed)

    def models(self) -> set[str]:
        self._look()
        return self._models | set(self._tx.state.unschedulable) if self._has_gained_room() else self._models

    def _has_gained_room(self) -> bool:
        """True if a device gained memory, so that a model may fit that did not fit before."""
        before, after = self._tx.origin.bookings, self._tx.state.bookings
        for key in self._tx.changed_devices():
            new, old = after.get(key), before.get(key)
            if new is not None and not new.closed_reason:
                if old is None or old.closed_reason:
                    return True
                if (
                    new.free_bytes > old.free_bytes
                    or new.free_soon_bytes > old.free_soon_bytes
                    or new.idle_bytes > old.idle_bytes
                    or new.evictable_bytes > old.evictable_bytes
                ):
                    return True
        return False

    def _look(self) -> None:
        changes = self._tx.changes
        for change in changes[self._read :]:
            if isinstance(change, Put):
                self._touch(change.entity)
            elif change.kind in _BY_MODEL:
                self._models.add(change.key)
            elif (old := self._tx.original(change.kind, change.key)) is not None:
                self._touch(old)
        self._read = len(changes)

    def _touch(self, entity: Entity) -> None:
        if type(entity) in _BY_MODEL:
            self._models.add(key_of(entity))
        elif isinstance(entity, Instance | Waiter | Migration):
            self._models.add(entity.model)
        elif isinstance(entity, InstanceReport):
            self._models.add(entity.status.model)
        elif isinstance(entity, Node | Presence):
            self._nodes.add(entity.key)
