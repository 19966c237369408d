"""The end of an engine's process: expected, a failure, or a failed restore that is followed by a cold start."""

from __future__ import annotations

from services.nodeagent.domain import resuming, stopping, suspending, teardown
from services.nodeagent.domain.events import DrainAnswered, EngineExited, HoldAnswered
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Turn
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
            suspending.ask_again(turn, instance.instance_id)
            return
        error = no_room
    instance = teardown.mark_gone(turn, instance, error)
    stopping.on_drain_answer(turn, DrainAnswered(instance.instance_id, only_if_idle=True))
    suspending.on_hold_answer(turn, HoldAnswered(instance.instance_id, only_if_idle=True))
    suspending.ask_again(turn, instance.instance_id)
    teardown.free(turn, instance)
