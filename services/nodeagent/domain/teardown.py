"""From an exited process to free memory.

Weights are released, memory is verified, and then the booking is removed.
"""

from __future__ import annotations

from services.nodeagent.domain.events import (
    MemoryFreed,
    Release,
    ReleaseFailed,
    VerifyMemoryFreed,
    WeightsReleased,
)
from services.nodeagent.domain.state import RELEASE_RETRY_S, Instance, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState


def mark_gone(transition: Transition, instance: Instance, error: ErrorBody | None) -> Instance:
    """Record that the process has exited.

    The instance failed if it was not asked to stop and `error` is set; else it is draining.
    """
    died = not instance.stop_asked and error is not None
    ended = {"snapshot_bytes": 0, "pause_asked": False, "pausing": False, "freezing": False}
    update = {
        "process": Process.GONE,
        "state": InstanceState.FAILED if died or instance.state is InstanceState.FAILED else InstanceState.DRAINING,
        "error": (instance.error or error) if died else instance.error,
        "phase": None,
        "adopt_until": None,
        "drain_until": None,
        "kill_at": None,
        "suspend_state": instance.suspend_state.model_copy(update=ended),
    }
    return transition.change(instance, **update)


def free(transition: Transition, instance: Instance) -> None:
    """Start to free resources: verify the memory and release the weights."""
    transition.emit(VerifyMemoryFreed(instance.instance_id))
    release(transition, instance)


def release(transition: Transition, instance: Instance) -> None:
    """Release the instance's weights."""
    transition.put(instance.model_copy(update={"release_at": None}))
    transition.emit(Release(instance.instance_id))


def on_released(transition: Transition, event: WeightsReleased) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.weights_freed is None:
        _give_back(transition, instance.model_copy(update={"weights_freed": event.freed_bytes, "release_at": None}))


def on_release_failed(transition: Transition, event: ReleaseFailed) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.weights_freed is None:
        transition.put(instance.model_copy(update={"release_at": transition.now + RELEASE_RETRY_S}))


def on_memory_freed(transition: Transition, event: MemoryFreed) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.GONE and instance.memory_freed is None:
        _give_back(transition, instance.model_copy(update={"memory_freed": event.freed_bytes}))


def _give_back(transition: Transition, instance: Instance) -> None:
    """Remove the booking once all memory is free. This is the only place that does so."""
    if instance.freed_bytes is None or instance.process is not Process.GONE:
        transition.put(instance)
        return
    transition.set_ledger(transition.state.ledger.remove_booking(instance.instance_id))
    ended = InstanceState.FAILED if instance.state is InstanceState.FAILED else InstanceState.STOPPED
    transition.change(instance, state=ended, ended_at=transition.now)
