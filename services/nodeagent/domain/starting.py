"""From the command to a ready engine, and what engines report."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import process_exit, suspending, teardown, termination
from services.nodeagent.domain.events import (
    AskDrain,
    Assess,
    EngineForked,
    Fork,
    ForkFailed,
    LoaderHeard,
    Measure,
    Ping,
    Publish,
    Release,
    StartCommand,
)
from services.nodeagent.domain.fencing import stale
from services.nodeagent.domain.reservations import Reservation
from services.nodeagent.domain.state import STRAY_HOLDER_S, Instance, Lap, Parking, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport
from shared.contracts.loader import instance_of
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.errors import Conflict, EngineFailed, InsufficientMemory, ShuttingDown


def on_start(turn: Turn, event: StartCommand) -> None:
    """1. Stale → refused. 2. Known → done again, unless it is leaving. 3. Shutting down → refused. 4. Does not fit → queued if
    it may wait, else refused, and what the loader may already hold for it is let go. 5. Booked, recorded, forked."""
    command, known = event.command, turn.find(event.command.instance_id)
    refused = stale(turn, command.token, known)
    if refused is not None:  # 1
        turn.reply(event.reply, refused)
        return
    if known is not None:  # 2
        if known.stop_asked or not (known.state.starting or known.state is InstanceState.READY):
            turn.reply(
                event.reply, Conflict(f"instance {command.instance_id} is {known.state}; a new start needs a new instance id")
            )
        else:
            turn.change(known, token=command.token)
            turn.reply(event.reply)
        return
    if turn.state.stopping:  # 3
        turn.emit(Release(command.instance_id))
        turn.reply(event.reply, ShuttingDown("this node is shutting down"))
        return
    reservation = Reservation(
        command.instance_id,
        command.device_ids,
        command.reserve_bytes,
        command.priority,
        turn.now,
        turn.now + command.wait_ms / 1000,
    )
    new = Instance(command=command, token=command.token, progress_at=turn.now, parking=Parking(begun_at=turn.now))
    refusal = turn.reserve(reservation)
    if refusal is not None and command.wait_ms and isinstance(refusal, InsufficientMemory) and refusal.should_retry:  # 4
        turn.enqueue(reservation)
        turn.change(new.model_copy(update={"process": Process.QUEUED, "booked": False, "phase": Phase.RESERVE}))
        turn.reply(event.reply)
        return
    if refusal is not None:
        turn.emit(Release(command.instance_id))
        turn.reply(event.reply, refusal)
        return
    turn.change(new)  # 5
    turn.emit(Fork(command.instance_id))
    turn.reply(event.reply)


def on_forked(turn: Turn, event: EngineForked) -> None:
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.FORKING:
        return
    instance = turn.change(instance, process=Process.ALIVE, pid=event.pid, process_start=event.process_start, progress_at=turn.now)
    if instance.stop_asked or instance.state is InstanceState.FAILED:
        termination.kill(turn, instance)
    elif instance.heard_early:
        turn.emit(Ping(instance.instance_id))


def on_fork_failed(turn: Turn, event: ForkFailed) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.FORKING:
        process_exit.process_gone(turn, instance, event.error)


def on_report(turn: Turn, report: EngineReport) -> None:
    """1. Unknown instance: an engine nobody owns any more is asked to leave. 2. Faster than the launcher's answer: asked again after it.
    3. Gone, or another process than ours: nothing. 4. Taken over; then by state."""
    instance = turn.find(report.instance_id)
    if instance is None:  # 1
        turn.emit(AskDrain(report.instance_id, only_if_idle=False, reason="unknown to its nodeagent"))
        return
    if instance.process is Process.FORKING:  # 2
        turn.put(instance.model_copy(update={"heard_early": True}))
        return
    if instance.process is not Process.ALIVE or instance.pid != report.pid:  # 3
        return
    was = instance
    progressed = (report.state, report.phase) != (_engine_state(was), was.phase) or report.progress > was.progress
    instance = instance.model_copy(
        update={
            "heard": True,
            "adopt_until": None,
            "phase": report.phase if report.state == "loading" else None,
            "progress": report.progress,
            "load": report.load,
            "weights_id": report.weights_id or was.weights_id,
            "sleep_levels": report.hosted.sleep_levels if report.hosted is not None else was.sleep_levels,
            "engine_pids": report.hosted.pids if report.hosted is not None else was.engine_pids,
            "progress_at": turn.now if progressed or not was.heard else was.progress_at,
        }
    )
    turn.put(instance)
    if instance.parking.holding:
        suspending.on_idle_report(turn, instance)
    match report.state:  # 4
        case "loading" if instance.state is InstanceState.PREPARING:
            turn.change(instance, state=InstanceState.LOADING)
        case "ready" if instance.state.starting and instance.state is not InstanceState.RESUMING:
            begun = instance.parking.begun_at or turn.now
            lap = instance.parking.model_copy(update={"started": Lap(at=turn.now, took_s=turn.now - begun)})
            turn.change(instance, state=InstanceState.READY, progress=1.0, phase=None, parking=lap)
            turn.emit(Measure(instance.instance_id), Assess(instance.instance_id))
        case "failed" if instance.state is not InstanceState.FAILED:
            fail(turn, instance, report.error or EngineFailed("the engine gave up without saying why").body())
        case "draining" if instance.state is InstanceState.READY:
            turn.change(instance, state=InstanceState.DRAINING)
        case "stopped" if instance.kill_at is None:
            # It has said good-bye; if it does not go, it is helped.
            turn.put(instance.model_copy(update={"drain_until": turn.now + turn.state.policy.kill_grace_s}))
        case _ if not was.heard or was.adopt_until is not None:
            turn.change(instance)
        case _:
            turn.emit(Publish(urgent=False))


def on_loader(turn: Turn, event: LoaderHeard) -> None:
    """Bytes that arrive are progress, however slowly; and a loader that is back can release what it could not before."""
    for instance in list(turn.state.instances.values()):
        loaded = event.loaded.get(instance.instance_id, 0)
        if instance.state.starting and loaded > instance.loaded_bytes:
            turn.put(instance.model_copy(update={"loaded_bytes": loaded, "progress_at": turn.now}))
            turn.emit(Publish(urgent=False))
        elif instance.release_at is not None:
            teardown.release(turn, instance)
    _let_strays_go(turn, event)


def _let_strays_go(turn: Turn, event: LoaderHeard) -> None:
    """Weights held for instances that are not here (a start that was refused, a hold that came after the end) are let go in time."""
    strays = {
        holder: turn.state.strays.get(holder, turn.now)
        for holder in event.loaded
        if (instance := turn.find(instance_of(holder))) is None or instance.ended_at is not None
    }
    for holder, since in list(strays.items()):
        if turn.now - since >= STRAY_HOLDER_S:
            del strays[holder]
            turn.emit(Release(holder))
    turn.state = replace(turn.state, strays=strays)


def on_no_progress(turn: Turn, instance: Instance) -> None:
    limit = instance.command.card.spec.init_timeout
    phase: Phase | None = instance.phase
    where = f"in phase {phase.value}" if phase is not None else f"while {instance.state.value}"
    fail(turn, instance, EngineFailed(f"the start made no progress for {limit:g} s ({where}); init_timeout sets this limit").body())


def fail(turn: Turn, instance: Instance, error: ErrorBody) -> None:
    """It will not serve (any more): told at once, its process ended; its bytes stay booked until that is proved."""
    if instance.stop_asked:
        termination.terminate(turn, instance)
        return
    instance = turn.change(instance, state=InstanceState.FAILED, error=error, phase=None)
    termination.terminate(turn, instance)


def _engine_state(instance: Instance) -> str:
    return "loading" if instance.state is InstanceState.PREPARING else instance.state.value
