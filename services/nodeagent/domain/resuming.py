"""Bringing instances back: reserved first, and serving only when they have shown that they are as before; else one cold start."""

from __future__ import annotations

from typing import Any

from services.nodeagent.domain import termination
from services.nodeagent.domain.events import Assess, Fork, Measure, Reply, Resume, ResumeCommand, Resumed, ResumeFailed
from services.nodeagent.domain.fencing import stale
from services.nodeagent.domain.reservations import Reservation
from services.nodeagent.domain.state import Instance, Lap, Parking, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InsufficientMemory, NotFound

WEIGHT_OF_NEWEST = 0.3
SETTLED_S = 1.0
"""From the end of a resumption until its engine is looked at."""


def on_resume(turn: Turn, event: ResumeCommand) -> None:
    """1. Stale → refused. 2. Not here, or leaving → not found. 3. Ready, starting or resuming → done. 4. Held, not frozen yet → serves
    again. 5. Being frozen → as soon as it is. 6. Suspended → reserved and resumed, or queued, or refused."""
    command, instance = event.command, turn.find(event.command.instance_id)
    refused = stale(turn, command.token, instance)
    if refused is not None:  # 1
        turn.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.stop_asked or instance.state is InstanceState.FAILED:  # 2
        turn.reply(event.reply, NotFound(f"instance {command.instance_id} is not here (any more); start another one"))
        return
    # What this node was sent belongs to the newest plan; the start's own numbers stay.
    changed = {"plan_id": command.plan_id, "traceparent": command.traceparent}
    instance = turn.change(
        instance,
        token=command.token,
        command=instance.command.model_copy(update=changed if instance.state.parked else {}),
        parking=instance.parking.model_copy(update={"no_room": None}),
    )
    if instance.state is InstanceState.READY or instance.state.starting:  # 3
        turn.reply(event.reply)
    elif instance.parking.holding:  # 4
        serve_again(turn, instance)
        turn.reply(event.reply)
    elif not instance.state.parked:  # 5
        turn.park(instance, wake_asked=True)
        turn.reply(event.reply)
    elif any(r.instance_id == instance.instance_id for r in turn.state.queue):
        turn.reply(event.reply)
    else:  # 6
        error = reserve_and_resume(turn, instance, command.wait_ms / 1000, command.priority)
        turn.emit(Reply(event.reply, error))


def reserve_and_resume(turn: Turn, instance: Instance, wait_s: float, priority: int) -> ErrorBody | None:
    """Reserve and begin, or queue (None), or say why not."""
    need = max(instance.parking.need_bytes, instance.parking.left_bytes)
    reservation = Reservation(instance.instance_id, instance.command.device_ids, need, priority, turn.now, turn.now + wait_s)
    refusal = turn.reserve(reservation)
    if refusal is None:
        begin_resume(turn, turn.state.instances[instance.instance_id])
        return None
    if wait_s > 0 and isinstance(refusal, InsufficientMemory) and refusal.should_retry:
        turn.enqueue(reservation)
        return None
    return refusal.body()


def begin_resume(turn: Turn, instance: Instance) -> None:
    """Its bytes are booked."""
    instance = instance.model_copy(update={"state": InstanceState.RESUMING, "phase": Phase.RESTORE, "progress_at": turn.now})
    turn.park(instance, begun_at=turn.now, spilled="")
    turn.emit(Resume(instance.instance_id, instance.parking.outlook.way))


def serve_again(turn: Turn, instance: Instance) -> None:
    """It was held, and nothing was taken from it."""
    instance = instance.model_copy(update={"state": InstanceState.RESUMING, "drain_until": None, "progress_at": turn.now})
    turn.park(instance, holding=False, wake_asked=False, begun_at=turn.now)
    turn.emit(Resume(instance.instance_id, None))


def on_resumed(turn: Turn, event: Resumed) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked:
        return
    if instance.state is not InstanceState.RESUMING:
        return
    p = instance.parking
    frozen = p.freezing
    took = turn.now - p.begun_at
    more: dict[str, Any] = {}
    if frozen:
        known = p.resume_s if p.resume_s is not None else took
        more = {
            "resumed": Lap(at=turn.now, took_s=took),
            "resume_s": known + WEIGHT_OF_NEWEST * (took - known),
            "resumes": p.resumes + 1,
            "fell_back": None,
        }
    instance = instance.model_copy(update={"state": InstanceState.READY, "phase": None, "progress": 1.0, "adopt_until": None})
    turn.park(instance, freezing=False, wake_asked=False, snapshot_bytes=0, **more)
    # Reading its memory now would take processors, and its memory maps' locks, from the request that it came back for.
    after_s = SETTLED_S if frozen and instance.instance_id not in turn.state.early_asks else 0.0
    turn.emit(Assess(instance.instance_id, after_s), Measure(instance.instance_id, after_s))


def on_resume_failed(turn: Turn, event: ResumeFailed) -> None:
    """Its process is ended, and one cold start follows under the same name (`restart`)."""
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked:
        return
    if instance.state is not InstanceState.RESUMING:
        return
    instance = turn.park(instance, fell_back=event.error)
    termination.kill(turn, instance)


def restarts(instance: Instance) -> bool:
    """Whether the end of this instance's process is followed by a cold start: its restore failed, or killed it."""
    return instance.state is InstanceState.RESUMING and not instance.stop_asked


def restart(turn: Turn, instance: Instance, error: ErrorBody | None) -> ErrorBody | None:
    """The process is gone; start another one for the same instance. The reason why not, if there is no room for a cold start now."""
    command, p = instance.command, instance.parking
    reason = p.fell_back or error or EngineFailed("the engine ended while it was being restored").body()
    refusal = turn.state.ledger.refusal(command.device_ids, command.reserve_bytes, but=instance.instance_id)
    if refusal is not None:
        return InsufficientMemory(f"the restore failed ({reason.message}), and a cold start has no room: {refusal.message}").body()
    turn.books(turn.state.ledger.rebook(instance.instance_id, command.device_ids, command.reserve_bytes))
    fresh = Instance(
        command=command,
        token=instance.token,
        progress_at=turn.now,
        parking=Parking(fell_back=reason, resumes=p.resumes, suspended=p.suspended, resumed=p.resumed, begun_at=turn.now),
    )
    turn.change(fresh)
    turn.emit(Fork(instance.instance_id))
    return None
