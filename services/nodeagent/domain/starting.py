"""Starting instances, and handling their engines' reports."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import binding, isolation, process_exit, suspending, teardown, templates, termination
from services.nodeagent.domain.events import (
    Assess,
    EngineForked,
    ForkFailed,
    LoaderReported,
    Measure,
    Ping,
    Publish,
    Release,
    RequestDrain,
    StartCommand,
)
from services.nodeagent.domain.fencing import check_stale
from services.nodeagent.domain.reservations import Reservation
from services.nodeagent.domain.state import STRAY_HOLDER_S, Instance, Process, SuspendState, TimedStep
from services.nodeagent.domain.transition import Transition
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineReport
from shared.contracts.loader import instance_of
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.contracts.stages import whole_instance
from shared.errors import Conflict, EngineFailed, InsufficientMemory, MemoryExceeded, ShuttingDown
from shared.unit_charges import booked_weights

_MEASURED_AFTER_S = 0.25
"""An executor's memory is measured when the first requests of an instance have been answered: the
process, which other models use, would compute slower meanwhile.
"""


def on_start(transition: Transition, event: StartCommand) -> None:
    """Handle a start command.

    1. Stale: refused.
    2. Known: done again, unless it is stopping.
    3. Shutting down: refused.
    4. Shared, and several devices are granted: bound to one of them (binding.py).
    5. Does not fit: queued if it may wait, else refused; weights that the loader holds for it are
       released.
    6. Booked, recorded, forked; or the engine of its template is taken (templates.py).
    """
    command, known = event.command, transition.find(event.command.instance_id)
    refused = check_stale(transition, command.token, known)
    if refused is not None:  # 1
        transition.reply(event.reply, refused)
        return
    if known is not None:  # 2
        if known.stop_asked or not (known.state.starting or known.state is InstanceState.READY):
            transition.reply(
                event.reply, Conflict(f"Instance {command.instance_id} is {known.state}; a new start needs a new instance id")
            )
        else:
            transition.change(known, token=command.token)
            transition.reply(event.reply)
        return
    if transition.state.stopping:  # 3
        transition.emit(Release(command.instance_id))
        transition.reply(event.reply, ShuttingDown("This node is shutting down"))
        return
    is_shared = isolation.shares(transition, command)
    if not is_shared and command.executor_bytes:  # its own process needs what an executor would
        own = {"reserve_bytes": command.reserve_bytes + command.executor_bytes, "executor_bytes": 0}
        command = command.model_copy(update=own)
    reservation = Reservation(
        command.instance_id,
        command.device_ids,
        command.reserve_bytes,
        command.priority,
        transition.now,
        transition.now + command.wait_ms / 1000,
        weights=booked_weights(command.card, command.kv_bytes, command.executor_bytes),
    )
    bound = binding.bind(transition.state, command, reservation) if is_shared else None
    if bound is not None:  # 4
        command = command.model_copy(update={"device_ids": (bound.device_id,)})
        reservation = replace(reservation, device_ids=command.device_ids)
    new = Instance(
        command=command,
        token=command.token,
        progress_at=transition.now,
        suspend_state=SuspendState(begun_at=transition.now),
        is_shared=is_shared,
        binding=bound,
    )
    before = transition.state.ledger
    transition.set_ledger(templates.ledger_without_template(transition.state, command))
    refusal = transition.reserve(reservation)
    if refusal is not None:
        transition.set_ledger(before)
    if refusal is not None and command.wait_ms and isinstance(refusal, InsufficientMemory) and refusal.should_retry:  # 5
        transition.enqueue(reservation)
        transition.change(new.model_copy(update={"process": Process.QUEUED, "booked": False, "phase": Phase.RESERVE}))
        transition.reply(event.reply)
        return
    if refusal is not None:
        transition.emit(Release(command.instance_id))
        transition.reply(event.reply, refusal)
        return
    templates.begin(transition, new)  # 6
    transition.reply(event.reply)


def on_forked(transition: Transition, event: EngineForked) -> None:
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.FORKING:
        return
    instance = transition.change(
        instance, process=Process.ALIVE, pid=event.pid, process_start=event.process_start, progress_at=transition.now
    )
    isolation.charge_executor(transition, instance)
    if instance.stop_asked or instance.state is InstanceState.FAILED:
        termination.kill(transition, instance)
    elif instance.reported_early:
        transition.emit(Ping(instance.instance_id))


def on_fork_failed(transition: Transition, event: ForkFailed) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.FORKING:
        process_exit.process_gone(transition, instance, event.error)


def on_report(transition: Transition, report: EngineReport) -> None:
    """Handle an engine's report.

    0. A later stage of a known instance: its error is the instance's.
    1. Unknown instance, or a process that its launcher started after the start had failed: an
       unowned engine is asked to drain.
    2. Before the launcher's answer: requested again afterwards.
    3. Exited, or another process: ignored.
    4. Stored; then by state.
    """
    instance = transition.find(report.instance_id)
    whole = transition.find(whole_instance(report.instance_id)) if instance is None else None
    if whole is not None and whole.process in (Process.FORKING, Process.ALIVE):  # 0
        if report.state == "failed" and whole.process is Process.ALIVE and whole.state is not InstanceState.FAILED:
            fail(transition, whole, report.error or EngineFailed("A stage failed without a reason").body())
        return
    if instance is None or _is_late(instance, report):  # 1
        transition.emit(RequestDrain(report.instance_id, only_if_idle=False, reason="unknown to its nodeagent"))
        return
    if instance.process is Process.FORKING:  # 2
        transition.put(instance.model_copy(update={"reported_early": True}))
        return
    if instance.process is not Process.ALIVE or instance.pid != report.pid:  # 3
        return
    was = instance
    progressed = (report.state, report.phase) != (_engine_state(was), was.phase) or report.progress > was.progress
    instance = instance.model_copy(
        update={
            "has_reported": True,
            "adopt_until": None,
            "phase": report.phase if report.state == "loading" else None,
            "progress": report.progress,
            "load": report.load,
            "weights_id": report.weights_id or was.weights_id,
            "accepts_requests": report.accepts_requests,
            "sleep_levels": report.hosted.sleep_levels if report.hosted is not None else was.sleep_levels,
            "engine_pids": report.hosted.pids if report.hosted is not None else was.engine_pids,
            "progress_at": transition.now if progressed or not was.has_reported else was.progress_at,
        }
    )
    if report.fell_back is not None and instance.suspend_state.fell_back is None:
        state = instance.suspend_state.model_copy(update={"fell_back": report.fell_back})
        instance = instance.model_copy(update={"suspend_state": state})
    transition.put(instance)
    if instance.suspend_state.pausing:
        suspending.on_idle_report(transition, instance)
    match report.state:  # 4
        case "loading" if instance.state is InstanceState.PREPARING:
            transition.change(instance, state=InstanceState.LOADING)
            if instance.accepts_requests:
                transition.emit(Publish(is_awaited=True))
        case "loading" if instance.accepts_requests and not was.accepts_requests:
            transition.emit(Publish(is_awaited=True))
        case "ready" if instance.state.starting and instance.state is not InstanceState.RESUMING:
            begun = instance.suspend_state.begun_at or transition.now
            lap = instance.suspend_state.model_copy(update={"started": TimedStep(at=transition.now, took_s=transition.now - begun)})
            transition.change(instance, state=InstanceState.READY, progress=1.0, phase=None, suspend_state=lap)
            measured_after_s = _MEASURED_AFTER_S if instance.is_shared else 0.0
            transition.emit(Publish(is_awaited=True), Measure(instance.instance_id, measured_after_s), Assess(instance.instance_id))
            binding.record_start_time(transition, instance, transition.now - begun)
        case "failed" if instance.state is not InstanceState.FAILED:
            if report.error is not None and report.error.code == MemoryExceeded.code:
                isolation.separate(transition, instance)
            fail(transition, instance, report.error or EngineFailed("The engine failed without a reason").body())
        case "draining" if instance.state is InstanceState.READY:
            transition.change(instance, state=InstanceState.DRAINING)
        case "stopped" if instance.is_shared:
            termination.terminate(transition, instance)  # its executor has to unmap it
        case "stopped" if instance.kill_at is None:
            # The engine reported its exit; it is ended if it does not exit.
            transition.put(instance.model_copy(update={"drain_until": transition.now + transition.state.policy.kill_grace_s}))
        case _ if not was.has_reported or was.adopt_until is not None:
            transition.change(instance)
        case _:
            transition.emit(Publish(urgent=False))


def _is_late(instance: Instance, report: EngineReport) -> bool:
    """True if the start has failed, and its process runs nevertheless."""
    return instance.process is Process.GONE and instance.pid != report.pid and report.state not in ("stopped", "failed")


def on_loader(transition: Transition, event: LoaderReported) -> None:
    """Handle a loader status: units on devices, progress of loads, and retries of releases."""
    transition.set_ledger(replace(transition.state.ledger, units=event.units))
    transition.state = replace(transition.state, traffic=event.traffic)
    for instance in list(transition.state.instances.values()):
        loaded = event.loaded.get(instance.instance_id, 0)
        if instance.state.starting and loaded > instance.loaded_bytes:
            transition.put(instance.model_copy(update={"loaded_bytes": loaded, "progress_at": transition.now}))
            transition.emit(Publish(urgent=False))
        elif instance.release_at is not None:
            teardown.release(transition, instance)
    _release_strays(transition, event)


def _release_strays(transition: Transition, event: LoaderReported) -> None:
    """Release weights held for instances that do not exist, after a while.

    They belong to refused starts, or were attached after an exit.
    """
    stray_holders = {
        holder: transition.state.stray_holders.get(holder, transition.now)
        for holder in event.loaded
        if (instance := transition.find(instance_of(holder))) is None or instance.ended_at is not None
    }
    for holder, since in list(stray_holders.items()):
        if transition.now - since >= STRAY_HOLDER_S:
            del stray_holders[holder]
            transition.emit(Release(holder))
    transition.state = replace(transition.state, stray_holders=stray_holders)


def on_no_progress(transition: Transition, instance: Instance) -> None:
    limit = instance.command.card.spec.init_timeout
    phase: Phase | None = instance.phase
    where = f"in phase {phase.value}" if phase is not None else f"while {instance.state.value}"
    fail(
        transition,
        instance,
        EngineFailed(f"The start made no progress for {limit:g} s ({where}); init_timeout sets this limit").body(),
    )


def fail(transition: Transition, instance: Instance, error: ErrorBody) -> None:
    """Fail an instance: publish it at once and end its process.

    Its bytes stay booked until the process has exited.
    """
    if instance.stop_asked:
        termination.terminate(transition, instance)
        return
    instance = transition.change(instance, state=InstanceState.FAILED, error=error, phase=None)
    termination.terminate(transition, instance)


def _engine_state(instance: Instance) -> str:
    return "loading" if instance.state is InstanceState.PREPARING else instance.state.value
