"""From a process that is gone to bytes that are free: weights released, memory read back, and only then the booking given up."""

from __future__ import annotations

from services.nodeagent.domain import parking, resuming, stopping
from services.nodeagent.domain.events import (
    DrainAnswered,
    EngineExited,
    HoldAnswered,
    MemoryProved,
    ProveMemory,
    Release,
    ReleaseFailed,
    WeightsReleased,
)
from services.nodeagent.domain.state import RELEASE_RETRY_S, Instance, Process
from services.nodeagent.domain.turn import Turn
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState


def on_exit(turn: Turn, event: EngineExited) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.ALIVE and instance.pid == event.pid:
        clean = instance.state is InstanceState.DRAINING and event.returncode == 0
        process_gone(turn, instance, None if clean else event.error)


def process_gone(turn: Turn, instance: Instance, error: ErrorBody | None) -> None:
    """Asked to go, or gone in good order: on its way to stopped. Otherwise failed, with what it reported itself before what we saw; one
    that was being restored is started cold, once."""
    if resuming.restarts(instance):
        no_room = resuming.restart(turn, instance, error)
        if no_room is None:
            parking.ask_again(turn, instance.instance_id)
            return
        error = no_room
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
    instance = turn.change(instance, **update)
    stopping.on_drain_answer(turn, DrainAnswered(instance.instance_id, only_if_idle=True))
    parking.on_hold_answer(turn, HoldAnswered(instance.instance_id, only_if_idle=True))
    parking.ask_again(turn, instance.instance_id)
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
