"""The exit of an engine's process.

It is expected, a failure, or a failed resume that is followed by a cold start.
"""

from __future__ import annotations

from services.nodeagent.domain import isolation, resuming, stopping, suspending, teardown
from services.nodeagent.domain.events import DrainAnswered, EngineExited, PauseAnswered
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.engines.final_charges import FinalCharges


def on_exit(transition: Transition, event: EngineExited) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.ALIVE and instance.pid == event.pid:
        isolation.count_crash(
            transition, instance, event.culprit, event.returncode, is_stuck=event.is_stuck, is_fault=event.is_fault
        )
        if not event.is_detached:
            isolation.on_executor_exited(transition, instance)
        # The exit status of an earlier agent's child is unknown: one that drained was asked to end.
        is_suspending = instance.suspend_state.pausing or instance.suspend_state.freezing
        is_expected = event.returncode == 0 or (event.returncode is None and not is_suspending)
        clean = instance.state is InstanceState.DRAINING and is_expected
        process_gone(transition, instance, None if clean else event.error, event.charges)


def process_gone(transition: Transition, instance: Instance, error: ErrorBody | None, charges: FinalCharges | None = None) -> None:
    """Handle the exit of a process.

    After a stop request or a clean exit the instance proceeds to stopped. Otherwise it has failed,
    with the error that it reported itself if there is one. After a failed resume it is started
    cold, once.

    Args:
        transition: The decision.
        instance: The instance of the process.
        error: The failure that the process or the node reported.
        charges: The last meters of the process.
    """
    if charges is not None:
        instance = transition.put(instance.model_copy(update={"load": charges.apply_to(instance.load)}))
    transition.note_ended(instance)
    transition.dequeue(instance.instance_id)  # it may have waited to be resumed
    if resuming.restarts(instance):
        no_memory_error = resuming.restart(transition, instance, error)
        if no_memory_error is None:
            suspending.retry_deferred(transition, instance.instance_id)
            return
        error = no_memory_error
    instance = teardown.mark_gone(transition, instance, error)
    stopping.on_drain_answered(transition, DrainAnswered(instance.instance_id, only_if_idle=True))
    suspending.on_pause_answered(transition, PauseAnswered(instance.instance_id, only_if_idle=True))
    suspending.retry_deferred(transition, instance.instance_id)
    teardown.free(transition, instance)
