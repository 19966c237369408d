"""Resuming instances, or one cold start if a resume fails.

Memory is reserved first, and an instance serves only once verified.
"""

from __future__ import annotations

from typing import Any

from services.nodeagent.domain import termination
from services.nodeagent.domain.events import Assess, Fork, Measure, Reply, Resume, ResumeCommand, Resumed, ResumeFailed
from services.nodeagent.domain.fencing import check_stale
from services.nodeagent.domain.reservations import Reservation
from services.nodeagent.domain.state import Instance, NodeState, Process, SuspendState, TimedStep
from services.nodeagent.domain.transition import Transition
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InsufficientMemory, NotFound, RestoreFailed

WEIGHT_OF_NEWEST = 0.3
SETTLED_S = 1.0
"""Seconds from the end of a resume until its engine is assessed."""


def on_resume(transition: Transition, event: ResumeCommand) -> None:
    """Handle a resume command.

    1. Stale: refused.
    2. Unknown, or stopping: not found.
    3. Ready, starting or resuming: done.
    4. Paused, not frozen yet: serves again.
    5. Being frozen: resumed as soon as it is frozen.
    6. Suspended, and to be restored onto devices that its snapshot cannot go to: refused.
    7. Suspended: reserved and resumed, or queued, or refused.
    """
    command, instance = event.command, transition.find(event.command.instance_id)
    refused = check_stale(transition, command.token, instance)
    if refused is not None:  # 1
        transition.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.stop_asked or instance.state is InstanceState.FAILED:  # 2
        transition.reply(
            event.reply, NotFound(f"Instance {command.instance_id} is not running on this node. Start another instance")
        )
        return
    # A resume belongs to the newest plan; the numbers of the start stay.
    changed = {"plan_id": command.plan_id, "traceparent": command.traceparent}
    instance = transition.change(
        instance,
        token=command.token,
        command=instance.command.model_copy(update=changed if instance.state.parked else {}),
        suspend_state=instance.suspend_state.model_copy(update={"no_memory_error": None}),
    )
    if instance.state is InstanceState.READY or instance.state.starting:  # 3
        transition.reply(event.reply)
    elif instance.suspend_state.pausing:  # 4
        serve_again(transition, instance)
        transition.reply(event.reply)
    elif not instance.state.parked:  # 5
        transition.park(instance, resume_requested=True)
        transition.reply(event.reply)
    elif any(r.instance_id == instance.instance_id for r in transition.state.queue):
        transition.reply(event.reply)
    elif why := explain_immovable(instance, command.device_ids):  # 6
        transition.reply(event.reply, RestoreFailed(why))
    else:  # 7
        error = reserve_and_resume(transition, instance, command.wait_ms / 1000, command.priority, command.device_ids)
        transition.emit(Reply(event.reply, error))


def explain_immovable(instance: Instance, device_ids: tuple[str, ...]) -> str:
    """The reason why an instance cannot be restored onto these devices; empty if it can."""
    p = instance.suspend_state
    if not device_ids or device_ids == instance.command.device_ids:
        return ""
    where = ", ".join(device_ids)
    if p.left_bytes:
        return f"{instance.instance_id} still has memory of its devices and cannot be restored onto {where}"
    if len(device_ids) != len(instance.command.device_ids) or not set(device_ids) <= set(p.outlook.moves_to):
        possible = ", ".join((*instance.command.device_ids, *p.outlook.moves_to))
        return f"The snapshot of {instance.instance_id} cannot be restored onto {where}, only onto {possible}"
    return ""


def reserve_and_resume(
    transition: Transition, instance: Instance, wait_s: float, priority: int, device_ids: tuple[str, ...] = ()
) -> ErrorBody | None:
    """Reserve memory and resume, or queue the reservation.

    Args:
        transition: The decision.
        instance: The suspended instance.
        wait_s: Seconds that it may wait for memory.
        priority: Of the reservation.
        device_ids: Other devices to restore onto; none: those that it had.

    Returns:
        Why it cannot be resumed; None: it is being resumed, or waits.
    """
    need = max(instance.suspend_state.need_bytes, instance.suspend_state.left_bytes)
    devices = device_ids or instance.command.device_ids
    reservation = Reservation(instance.instance_id, devices, need, priority, transition.now, transition.now + wait_s)
    refusal = transition.reserve(reservation)
    if refusal is None:
        begin_resume(transition, transition.state.instances[instance.instance_id], devices)
        return None
    if wait_s > 0 and isinstance(refusal, InsufficientMemory) and refusal.should_retry:
        transition.enqueue(reservation)
        return None
    return refusal.body()


def begin_resume(transition: Transition, instance: Instance, device_ids: tuple[str, ...]) -> None:
    """Resume an instance whose memory is booked on `device_ids`.

    The devices that the snapshot is of are recorded until it is restored.
    """
    before = instance.command.device_ids
    moved_from = before if device_ids != before else ()
    instance = instance.model_copy(update={"state": InstanceState.RESUMING, "phase": Phase.RESTORE, "progress_at": transition.now})
    if moved_from:
        instance = instance.model_copy(update={"command": instance.command.model_copy(update={"device_ids": device_ids})})
    transition.park(instance, begun_at=transition.now, spilled="", spilled_bytes=0, moved_from=moved_from)
    transition.emit(Resume(instance.instance_id, instance.suspend_state.outlook.way))


def serve_again(transition: Transition, instance: Instance) -> None:
    """Unpause an engine that was not frozen."""
    instance = instance.model_copy(update={"state": InstanceState.RESUMING, "drain_until": None, "progress_at": transition.now})
    transition.park(instance, pausing=False, resume_requested=False, begun_at=transition.now)
    transition.emit(Resume(instance.instance_id, None))


def on_resumed(transition: Transition, event: Resumed) -> None:
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked:
        return
    if _is_unpausing(transition.state, instance):
        transition.park(instance, pause_asked=False)
    if instance.state is not InstanceState.RESUMING:
        return
    p = instance.suspend_state
    frozen = p.freezing
    took = transition.now - p.begun_at
    more: dict[str, Any] = {}
    if frozen:
        known = p.resume_s if p.resume_s is not None else took
        more = {
            "resumed": TimedStep(at=transition.now, took_s=took),
            "resume_s": known + WEIGHT_OF_NEWEST * (took - known),
            "resumes": p.resumes + 1,
            "fell_back": None,
        }
    instance = instance.model_copy(update={"state": InstanceState.READY, "phase": None, "progress": 1.0, "adopt_until": None})
    undone = {"pause_asked": False, "freezing": False, "resume_requested": False, "snapshot_bytes": 0, "moved_from": ()}
    transition.park(instance, **undone, **more)
    # Reading its memory now would compete with the request that it was resumed for.
    after_s = SETTLED_S if frozen and instance.instance_id not in transition.state.deferred_suspends else 0.0
    transition.emit(Assess(instance.instance_id, after_s), Measure(instance.instance_id, after_s))


def on_resume_failed(transition: Transition, event: ResumeFailed) -> None:
    """Handle an engine that does not serve again.

    1. It may be paused, and its instance stayed ready: the routes are withdrawn, and the engine is
       asked once more.
    2. Otherwise its process is ended; one cold start follows under the same id (`restart`).
    """
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked:
        return
    if _is_unpausing(transition.state, instance):  # 1
        serve_again(transition, instance)
    elif instance.state is InstanceState.RESUMING:  # 2
        termination.kill(transition, transition.park(instance, fell_back=event.error))


def has_to_serve_again(state: NodeState, instance_id: str) -> bool:
    """True if a paused engine was asked to serve again, and no newer command overrides that."""
    instance = state.instances.get(instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked:
        return False
    is_resuming = instance.state is InstanceState.RESUMING and not instance.suspend_state.freezing
    return is_resuming or _is_unpausing(state, instance)


def _is_unpausing(state: NodeState, instance: Instance) -> bool:
    """True if a ready instance's engine, which may be paused, was asked to serve again."""
    is_asked_to_pause = instance.instance_id in state.pause_waiters
    return instance.state is InstanceState.READY and instance.suspend_state.pause_asked and not is_asked_to_pause


def restarts(instance: Instance) -> bool:
    """True if a cold start follows this exit.

    A resume failed, or a template's process ended before it served its new model.
    """
    if instance.stop_asked:
        return False
    changing = instance.taken_from is not None and instance.state in (InstanceState.PREPARING, InstanceState.LOADING)
    return instance.state is InstanceState.RESUMING or changing


def restart(transition: Transition, instance: Instance, error: ErrorBody | None) -> ErrorBody | None:
    """Start a new process for the same instance.

    Returns the error if a cold start has no memory.
    """
    command, p = instance.command, instance.suspend_state
    reason = p.fell_back or error or EngineFailed("The engine exited while it was being resumed").body()
    refusal = transition.state.ledger.refusal(command.device_ids, command.reserve_bytes, but=instance.instance_id)
    if refusal is not None:
        return InsufficientMemory(f"The resume failed ({reason.message}), and a cold start has no memory: {refusal.message}").body()
    transition.set_ledger(transition.state.ledger.set_booking(instance.instance_id, command.device_ids, command.reserve_bytes))
    fresh = Instance(
        command=command,
        token=instance.token,
        progress_at=transition.now,
        suspend_state=SuspendState(
            fell_back=reason, resumes=p.resumes, suspended=p.suspended, resumed=p.resumed, begun_at=transition.now
        ),
    )
    transition.change(fresh)
    transition.emit(Fork(instance.instance_id))
    return None
