"""From a process that is gone to bytes that are free: weights released, memory read back, and only then the booking given up."""

from __future__ import annotations

from services.nodeagent.domain.events import (
    MemoryProved,
    ProveMemory,
    Release,
    ReleaseFailed,
    WeightsReleased,
)
from services.nodeagent.domain.state import RELEASE_RETRY_S, Instance, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState


def mark_gone(turn: Turn, instance: Instance, error: ErrorBody | None) -> Instance:
    """Record that the process is gone: failed if it was not asked to stop and `error` is set, else draining."""
    died = not instance.stop_asked and error is not None
    update = {
        "process": Process.GONE,
        "state": InstanceState.FAILED if died or instance.state is InstanceState.FAILED else InstanceState.DRAINING,
        "error": (instance.error or error) if died else instance.error,
        "phase": None,
        "adopt_until": None,
        "drain_until": None,
        "kill_at": None,
        "parking": instance.parking.model_copy(update={"snapshot_bytes": 0, "holding": False, "freezing": False}),
    }
    return turn.change(instance, **update)


def free(turn: Turn, instance: Instance) -> None:
    """Start to give back what the instance holds: its memory is read back, its weights are released."""
    turn.emit(ProveMemory(instance.instance_id))
    release(turn, instance)


def release(turn: Turn, instance: Instance) -> None:
    turn.put(instance.model_copy(update={"release_at": None}))
    turn.emit(Release(instance.instance_id))


def on_released(turn: Turn, event: WeightsReleased) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.weights_freed is None:
        _give_back(turn, instance.model_copy(update={"weights_freed": event.freed_bytes, "release_at": None}))


def on_release_failed(turn: Turn, event: ReleaseFailed) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.weights_freed is None:
        turn.put(instance.model_copy(update={"release_at": turn.now + RELEASE_RETRY_S}))


def on_memory_proved(turn: Turn, event: MemoryProved) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.memory_freed is None:
        _give_back(turn, instance.model_copy(update={"memory_freed": event.freed_bytes}))


def _give_back(turn: Turn, instance: Instance) -> None:
    """The one place where bytes are given back."""
    if instance.freed_bytes is None or instance.process is not Process.GONE:
        turn.put(instance)
        return
    turn.books(turn.state.ledger.give_back(instance.instance_id))
    ended = InstanceState.FAILED if instance.state is InstanceState.FAILED else InstanceState.STOPPED
    turn.change(instance, state=ended, ended_at=turn.now)
