"""Suspending instances: the process stays, its memory is freed.

See resuming.py for the reverse.

    ready ──pause──► draining ──idle, frozen, memory verified──► suspended | asleep
                         └──impossible──► stopped
    suspended | asleep ──reserved──► resuming ──verified──► ready
                                         └──fails──► preparing (a cold start, once)

An instance that cannot be suspended is stopped instead. Its booking shrinks to the measured
remainder, and only then are the freed bytes available to others; it grows again before a resume.
"""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import resuming, stopping
from services.nodeagent.domain.events import (
    Assessed,
    Measured,
    PauseAnswered,
    PauseEngine,
    Reply,
    Resume,
    Spill,
    Spilled,
    StopCommand,
    Suspend,
    SuspendCommand,
    Suspended,
    SuspendFailed,
)
from services.nodeagent.domain.fencing import check_stale
from services.nodeagent.domain.state import DeferredSuspend, IdleWaiter, Instance, NodeState, Process, SuspendState, TimedStep
from services.nodeagent.domain.transition import Transition
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad
from shared.contracts.node import RESERVATION, InstanceState, StopInstance, SuspendWay
from shared.errors import DeadlineExceeded, EngineFailed, InstanceBusy, Unavailable, Unreachable
from shared.sizing import find_most_bytes

_LOST = frozenset({DeadlineExceeded.code, Unavailable.code, Unreachable.code})
"""Errors of requests without an answer: the engine may have carried them out."""
IN_HOST_MEMORY: tuple[SuspendWay, ...] = ("cuda", "sleep_cuda")
"""Methods whose snapshots are host memory of frozen processes."""
LOST_ANSWER_S = 15.0
"""Seconds after the first lost answer to a pause in which an idle engine has to answer: what waits
for its memory does not wait for the whole drain timeout.
"""


def not_suspendable_reason(state: NodeState, instance: Instance) -> str:
    """The reason why the instance would be stopped instead of suspended; empty if not."""
    suspend_state, outlook = instance.suspend_state, instance.suspend_state.outlook
    if outlook.way is None:
        return outlook.reason or "it has not been assessed yet"
    if outlook.snapshot_bytes > state.snapshot_budget:
        return (
            f"its snapshot of {_mib(outlook.snapshot_bytes)} exceeds this node's budget of {_mib(state.snapshot_budget)} "
            "(THAW_SNAPSHOT_BYTES)"
        )
    if leaks(suspend_state):
        return f"its engine leaks memory: it used {_mib(suspend_state.base_bytes)} after its start and {_mib(suspend_state.used_bytes)} now"
    expected = suspend_state.resume_s if suspend_state.resume_s is not None else outlook.resume_s
    is_cold = instance.taken_from is None  # the seconds of a change say nothing of a cold start
    if is_cold and suspend_state.started is not None and expected >= suspend_state.started.took_s:
        return f"a resume ({expected:.2f} s) is no faster than a cold start ({suspend_state.started.took_s:.2f} s)"
    return ""


def leaks(suspend_state: SuspendState) -> bool:
    """True if the engine has a leak: it is restarted instead of suspended.

    Until its first resume an engine may grow to its normal size.
    """
    base, used = suspend_state.base_bytes, suspend_state.used_bytes
    return suspend_state.resumes > 1 and base > 0 and used > find_most_bytes(base)


# Suspending


def on_suspend(transition: Transition, event: SuspendCommand) -> None:
    """Handle a suspend command.

    1. Stale: refused.
    2. Unknown, exited, failed or already suspended: done.
    3. Being suspended: the drain deadline can only become shorter.
    4. Resuming, or ready and not assessed yet: decided after the assessment.
    5. Not ready, or not suspendable: a stop.
    6. Only if idle: the engine decides, and its answer is the reply.
    7. Otherwise it drains.
    """
    command, instance = event.command, transition.find(event.command.instance_id)
    refused = check_stale(transition, command.token, instance)
    if refused is not None:  # 1
        transition.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.state is InstanceState.FAILED or instance.state.parked:  # 2
        if instance is not None:
            transition.dequeue(instance.instance_id)
        transition.reply(event.reply)
        return
    until = transition.now + command.drain_timeout_ms / 1000
    if instance.suspend_state.pausing or (instance.suspend_state.freezing and instance.state is InstanceState.DRAINING):  # 3
        if instance.drain_until is not None:
            until = min(until, instance.drain_until)
        transition.park(instance.model_copy(update={"token": command.token}), resume_requested=False)
        if instance.suspend_state.pausing:
            transition.put(transition.state.instances[instance.instance_id].model_copy(update={"drain_until": until}))
        transition.reply(event.reply)
        return
    is_resuming = instance.state is InstanceState.RESUMING
    if not instance.stop_asked and (
        is_resuming or (instance.state is InstanceState.READY and not instance.suspend_state.outlook.is_assessed)
    ):  # 4
        asks = (*transition.state.deferred_suspends.get(instance.instance_id, ()), DeferredSuspend(command, event.reply))
        transition.state = replace(
            transition.state, deferred_suspends={**transition.state.deferred_suspends, instance.instance_id: asks}
        )
        return
    if instance.state is not InstanceState.READY or instance.stop_asked or not_suspendable_reason(transition.state, instance):  # 5
        stop = StopInstance(
            token=command.token,
            instance_id=command.instance_id,
            only_if_idle=command.only_if_idle,
            drain_timeout_ms=command.drain_timeout_ms,
            reason=command.reason,
        )
        stopping.on_stop(transition, StopCommand(stop, event.reply))
        return
    instance = transition.put(instance.model_copy(update={"token": command.token}))
    if command.only_if_idle:  # 6
        transition.park(instance, pause_asked=True)
        waiting = transition.state.pause_waiters.get(instance.instance_id, ())
        asked = {
            **transition.state.pause_waiters,
            instance.instance_id: (*waiting, IdleWaiter(event.reply, command.drain_timeout_ms / 1000)),
        }
        transition.state = replace(transition.state, pause_waiters=asked)
        transition.emit(PauseEngine(instance.instance_id, only_if_idle=True))
        return
    pause(transition, instance, until)  # 7
    transition.reply(event.reply)


def retry_deferred(transition: Transition, instance_id: str) -> None:
    """Decide deferred suspensions.

    The instance has been assessed, has exited, or is restarting.
    """
    asks = transition.state.deferred_suspends.get(instance_id, ())
    transition.state = replace(
        transition.state, deferred_suspends={k: a for k, a in transition.state.deferred_suspends.items() if k != instance_id}
    )
    for ask in asks:
        on_suspend(transition, SuspendCommand(ask.command, ask.reply))


def pause(transition: Transition, instance: Instance, until: float) -> None:
    """Drain the instance, and ask its engine to refuse new requests.

    Gateways see the state.
    """
    instance = instance.model_copy(update={"state": InstanceState.DRAINING, "drain_until": until})
    transition.park(instance, pausing=True, resume_requested=False)
    transition.emit(PauseEngine(instance.instance_id, only_if_idle=False))


def on_pause_answered(transition: Transition, event: PauseAnswered) -> None:
    """Handle the engine's answer to a pause.

    1. Reply to commands that waited for it.
    2. Busy, or the answer was lost: asked again when the engine reports that it is idle. One that
       does not answer is stopped at the drain deadline, which is at most LOST_ANSWER_S away if the
       engine is idle.
    3. It cannot pause: stopped.
    4. With `only_if_idle`: no command needs the pause any more, or the answer was lost. The engine
       serves again.
    5. Paused: frozen.
    """
    instance = transition.find(event.instance_id)
    wanted = instance is not None and instance.process is Process.ALIVE and not instance.stop_asked
    if event.only_if_idle:  # 1
        asks = transition.state.pause_waiters.get(event.instance_id, ())
        transition.state = replace(
            transition.state, pause_waiters={k: a for k, a in transition.state.pause_waiters.items() if k != event.instance_id}
        )
        transition.emit(*(Reply(a.reply, event.error if wanted else None) for a in asks))
        if instance is None:
            return
        is_ready = wanted and instance.state is InstanceState.READY
        is_frozen = is_ready and event.error is None and bool(asks)
        has_to_unpause = is_ready and not is_frozen and (event.error is None or event.error.code in _LOST)  # 4
        if instance.suspend_state.pause_asked or has_to_unpause:
            instance = transition.park(instance, pause_asked=has_to_unpause)
        if is_frozen:
            freeze(transition, instance)
        elif has_to_unpause:
            transition.emit(Resume(instance.instance_id, None))
        return
    if instance is None or not wanted or not instance.suspend_state.pausing:
        return
    if event.error is not None:
        if event.error.code in _LOST:  # 2
            until = transition.now + LOST_ANSWER_S
            is_idle = instance.load.active + instance.load.waiting == 0
            if is_idle and (instance.drain_until is None or instance.drain_until > until):
                transition.put(instance.model_copy(update={"drain_until": until}))
            return
        if event.error.code != InstanceBusy.code:  # 3
            _give_up(transition, instance, event.error)
        elif instance.load.active + instance.load.waiting == 0:  # 2: it became idle before its answer arrived
            transition.emit(PauseEngine(instance.instance_id, only_if_idle=False))
        return
    freeze(transition, instance)  # 5


def on_idle_report(transition: Transition, instance: Instance) -> None:
    """A pausing engine has reported that it is idle."""
    if instance.suspend_state.pausing and not instance.stop_asked and instance.load.active + instance.load.waiting == 0:
        transition.emit(PauseEngine(instance.instance_id, only_if_idle=False))


def freeze(transition: Transition, instance: Instance) -> None:
    """Freeze a paused engine.

    The record is written first, so that the next agent knows what was in progress.
    """
    outlook = instance.suspend_state.outlook
    if not_suspendable_reason(transition.state, instance) or not make_room(
        transition, outlook.snapshot_bytes, instance.instance_id
    ):
        _give_up(
            transition,
            instance,
            EngineFailed(not_suspendable_reason(transition.state, instance) or "no room for its snapshot").body(),
        )
        return
    assert outlook.way is not None
    instance = instance.model_copy(update={"state": InstanceState.DRAINING, "drain_until": None, "adopt_until": None})
    transition.park(instance, pausing=False, freezing=True, begun_at=transition.now, snapshot_bytes=outlook.snapshot_bytes)
    transition.emit(Suspend(instance.instance_id, outlook.way))


def on_suspended(transition: Transition, event: Suspended) -> None:
    """Memory was verified: book the remainder only.

    The freed bytes become available to others here, and nowhere else.
    """
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or not instance.suspend_state.freezing or instance.stop_asked:
        return
    if instance.state is not InstanceState.DRAINING:
        return
    p, command = instance.suspend_state, instance.command
    transition.set_ledger(transition.state.ledger.set_booking(instance.instance_id, command.device_ids, event.left_bytes))
    # The builtin engine's KV cache grows with use: measured when idle it would be too small. The
    # maximum counts: after a resume only touched memory is in use, and on cpu the rest is in swap.
    held = event.left_bytes + event.snapshot_bytes if p.outlook.way == "cpu" else event.used_bytes
    most = max(held, event.used_bytes, p.used_bytes, p.base_bytes)
    need = max(most, command.reserve_bytes) if command.card.spec.engine == "builtin" else most
    state = InstanceState.ASLEEP if p.outlook.way == "sleep" else InstanceState.SUSPENDED
    instance = instance.model_copy(update={"state": state, "load": EngineLoad(completed=instance.load.completed), "phase": None})
    transition.park(
        instance,
        frees_bytes=event.freed_bytes,
        left_bytes=event.left_bytes,
        snapshot_bytes=event.snapshot_bytes,
        spilled="",
        spilled_bytes=0,
        need_bytes=need,
        used_bytes=most,
        base_bytes=most if p.resumes <= 1 else p.base_bytes,
        suspended=TimedStep(at=transition.now, took_s=transition.now - p.begun_at),
        outlook=p.outlook.model_copy(update={"snapshot_bytes": event.snapshot_bytes, "left_bytes": event.left_bytes}),
        resume_requested=False,
    )
    make_room(transition, 0, "")
    instance = transition.state.instances[instance.instance_id]
    if p.resume_requested and not instance.stop_asked:
        refused = resuming.reserve_and_resume(transition, instance, wait_s=0.0, priority=0)
        if refused is not None:
            # The resume was already acknowledged: the status reports the error, as after a wait in
            # vain.
            transition.park(instance, no_memory_error=refused.model_copy(update={"param": RESERVATION}))


def on_suspend_failed(transition: Transition, event: SuspendFailed) -> None:
    """The engine runs as before: serve again if wanted, else stop."""
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or not instance.suspend_state.freezing:
        return
    instance = transition.park(instance, freezing=False, snapshot_bytes=0)
    if instance.stop_asked:
        return
    if instance.suspend_state.resume_requested:
        resuming.serve_again(transition, instance)
        return
    _give_up(transition, instance, event.error)


def on_suspension_timeout(transition: Transition, instance: Instance) -> None:
    """Kill an instance whose suspension does not end, for example because the driver hangs."""
    limit_s = instance.command.card.spec.init_timeout
    reason = f"its suspension did not end within {limit_s:g} s; init_timeout sets this limit"
    outlook = instance.suspend_state.outlook.model_copy(update={"way": None, "reason": reason})
    stopping.begin(transition, transition.park(instance, outlook=outlook), 0.0, reason)


def _give_up(transition: Transition, instance: Instance, error: ErrorBody) -> None:
    """Stop the instance instead, and remember the reason."""
    outlook = instance.suspend_state.outlook.model_copy(update={"way": None, "reason": error.message})
    left = max(0.0, instance.drain_until - transition.now) if instance.drain_until is not None else 0.0
    instance = transition.park(instance, pausing=False, freezing=False, snapshot_bytes=0, outlook=outlook)
    stopping.begin(transition, instance, left or transition.state.policy.kill_grace_s, f"suspending failed: {error.message}")


# The snapshot budget


def make_room(transition: Transition, wanted: int, but: str) -> bool:
    """Bring the snapshots within the budget, with `wanted` more bytes.

    True if that succeeded.

    The least recently suspended instances are spilled to swap if their snapshot is in host memory,
    else stopped. Snapshots of page-out are in swap already.
    """
    while transition.state.snapshot_bytes_except(but) + wanted > transition.state.snapshot_budget:
        parked = [
            i
            for i in transition.state.instances.values()
            if i.state.parked
            and not i.stop_asked
            and i.instance_id != but
            and i.suspend_state.spilled != "writing"
            and i.suspend_state.snapshot_bytes
        ]
        if not parked:
            return False
        coldest = min(parked, key=lambda i: (i.suspend_state.suspended.at if i.suspend_state.suspended else 0.0, i.instance_id))
        way = coldest.suspend_state.outlook.way
        if transition.state.spills and way in IN_HOST_MEMORY and not coldest.suspend_state.spilled:
            transition.park(coldest, spilled="writing")
            transition.emit(Spill(coldest.instance_id, way))
        else:
            stopping.begin(transition, coldest, 0.0, "least recently suspended, and the node's snapshot budget is exhausted")
    return True


def on_spilled(transition: Transition, event: Spilled) -> None:
    """Handle the outcome of a spill.

    If it failed, the budget is enforced by other means.
    """
    instance = transition.find(event.instance_id)
    if instance is None or instance.suspend_state.spilled != "writing":
        return
    if event.error is None:
        before = instance.suspend_state.snapshot_bytes
        left = max(0, before - event.freed_bytes)
        transition.park(instance, spilled="written", spilled_bytes=before - left, snapshot_bytes=left)
    else:
        transition.park(instance, spilled="refused")
        make_room(transition, 0, "")


# Measurements


def on_assessed(transition: Transition, event: Assessed) -> None:
    """Handle an assessment.

    1. It began before the engine was frozen: it describes neither state, and is dropped. The way
       in which the engine is suspended stays.
    2. The first one since the start: its memory is the baseline for leaks; an instance that was
       started to be suspended is suspended now.
    3. Deferred suspensions are decided.
    """
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE:
        return
    p = instance.suspend_state
    if p.freezing:  # 1
        retry_deferred(transition, event.instance_id)  # 3
        return
    outlook = event.outlook
    if p.resumes and outlook.way == p.outlook.way:
        outlook = outlook.model_copy(update={"left_bytes": p.left_bytes or outlook.left_bytes})
    first = p.base_bytes == 0
    used = {"used_bytes": max(p.used_bytes, event.used_bytes)}
    # Growth until the first resume is normal use; later growth is a leak.
    base = max(p.base_bytes, event.used_bytes) if p.resumes <= 1 else p.base_bytes
    transition.park(instance, outlook=outlook, base_bytes=base, **used)
    _book_leak(transition, transition.state.instances[event.instance_id], event.used_bytes)
    instance = transition.state.instances[event.instance_id]
    if (
        first
        and instance.command.park
        and instance.state is InstanceState.READY
        and not not_suspendable_reason(transition.state, instance)
    ):  # 2
        pause(transition, instance, transition.now + transition.state.policy.kill_grace_s)
    retry_deferred(transition, event.instance_id)  # 3


def on_measured(transition: Transition, event: Measured) -> None:
    instance = transition.find(event.instance_id)
    if instance is not None and instance.process is Process.ALIVE and instance.state is InstanceState.READY:
        _book_leak(transition, instance, event.used_bytes)


def _book_leak(transition: Transition, instance: Instance, used: int) -> None:
    """Book bytes that an engine uses far beyond its booking.

    They are not available to others. The measurement of a shared instance is a part of its
    executor's memory, which is booked by itself.
    """
    if instance.is_shared:
        return
    booked = transition.state.ledger.bookings.get(instance.instance_id)
    total = booked.bytes_each * len(booked.device_ids) if booked is not None else 0
    if booked is not None and used > find_most_bytes(total):
        transition.set_ledger(transition.state.ledger.set_booking(instance.instance_id, booked.device_ids, used, booked.weights))
        transition.park(instance, need_bytes=used, used_bytes=used)


def _mib(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"
