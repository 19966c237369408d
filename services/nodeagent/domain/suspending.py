"""Suspending (and resuming: resuming.py): the process stays, its memory goes and comes back.

    ready ──hold──► draining ──idle, frozen, memory read back──► suspended | asleep ──reserved──► resuming ──proved──► ready
                        └──cannot──► stopped                              restore fails ──► preparing (a cold start, once)

What cannot be suspended is stopped instead. An instance's booking shrinks to what it was measured to leave in use, and only then are
the other bytes given away; it grows again before anything is brought back.
"""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import resuming, stopping
from services.nodeagent.domain.events import (
    AskHold,
    Assessed,
    HoldAnswered,
    Measured,
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
from services.nodeagent.domain.fencing import stale
from services.nodeagent.domain.state import EarlyAsk, IdleAsk, Instance, Lap, NodeState, Parking, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad
from shared.contracts.node import RESERVATION, InstanceState, StopInstance, SuspendWay
from shared.errors import EngineFailed, InstanceBusy

IN_HOST_MEMORY: tuple[SuspendWay, ...] = ("cuda", "sleep_cuda")
"""Ways whose snapshots are host memory of frozen processes."""
LEAK_FACTOR = 1.25
LEAK_FLOOR = 64 * 1024 * 1024
"""An engine that uses this much, and this part, more than after its start has leaked: it is started anew rather than suspended again."""


def why_not(state: NodeState, instance: Instance) -> str:
    """Why the instance would be stopped rather than suspended; empty if it would be suspended."""
    parking, outlook = instance.parking, instance.parking.outlook
    if outlook.way is None:
        return outlook.reason or "it has not been looked at yet"
    if outlook.snapshot_bytes > state.snapshot_budget:
        return (
            f"its snapshot of {_mib(outlook.snapshot_bytes)} is over this node's budget of {_mib(state.snapshot_budget)} "
            "(THAW_SNAPSHOT_BYTES)"
        )
    if leaks(parking):
        return f"its engine leaks: it used {_mib(parking.base_bytes)} after its start and {_mib(parking.used_bytes)} at last"
    expected = parking.resume_s if parking.resume_s is not None else outlook.resume_s
    if parking.started is not None and expected >= parking.started.took_s:
        return f"it comes back no sooner ({expected:.2f} s) than it starts cold ({parking.started.took_s:.2f} s)"
    return ""


def leaks(parking: Parking) -> bool:
    """Told after the first resumption only: until then an engine may grow into what it needs."""
    base, used = parking.base_bytes, parking.used_bytes
    return parking.resumes > 1 and base > 0 and used > LEAK_FACTOR * base and used > base + LEAK_FLOOR


# Suspending.


def on_suspend(turn: Turn, event: SuspendCommand) -> None:
    """1. Stale → refused. 2. Unknown, gone, failed or suspended already → done. 3. Being suspended → its drain can only become shorter.
    4. Coming back, or just ready and not looked at yet → once it was: what nobody knows is not impossible. 5. Not ready, or not to be
    suspended → a stop. 6. Only if idle → the engine is asked, its answer is the reply. 7. It drains."""
    command, instance = event.command, turn.find(event.command.instance_id)
    refused = stale(turn, command.token, instance)
    if refused is not None:  # 1
        turn.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.state is InstanceState.FAILED or instance.state.parked:  # 2
        if instance is not None:
            _dequeue(turn, instance.instance_id)
        turn.reply(event.reply)
        return
    until = turn.now + command.drain_timeout_ms / 1000
    if instance.parking.holding or (instance.parking.freezing and instance.state is InstanceState.DRAINING):  # 3
        if instance.drain_until is not None:
            until = min(until, instance.drain_until)
        turn.park(instance.model_copy(update={"token": command.token}), wake_asked=False)
        if instance.parking.holding:
            turn.put(turn.state.instances[instance.instance_id].model_copy(update={"drain_until": until}))
        turn.reply(event.reply)
        return
    coming = instance.state is InstanceState.RESUMING
    if not instance.stop_asked and (coming or (instance.state is InstanceState.READY and not instance.parking.outlook.looked)):  # 4
        asks = (*turn.state.early_asks.get(instance.instance_id, ()), EarlyAsk(command, event.reply))
        turn.state = replace(turn.state, early_asks={**turn.state.early_asks, instance.instance_id: asks})
        return
    if instance.state is not InstanceState.READY or instance.stop_asked or why_not(turn.state, instance):  # 5
        stop = StopInstance(
            token=command.token,
            instance_id=command.instance_id,
            only_if_idle=command.only_if_idle,
            drain_timeout_ms=command.drain_timeout_ms,
            reason=command.reason,
        )
        stopping.on_stop(turn, StopCommand(stop, event.reply))
        return
    instance = turn.put(instance.model_copy(update={"token": command.token}))
    if command.only_if_idle:  # 6
        waiting = turn.state.hold_asks.get(instance.instance_id, ())
        asked = {**turn.state.hold_asks, instance.instance_id: (*waiting, IdleAsk(event.reply, command.drain_timeout_ms / 1000))}
        turn.state = replace(turn.state, hold_asks=asked)
        turn.emit(AskHold(instance.instance_id, only_if_idle=True))
        return
    hold(turn, instance, until)  # 7
    turn.reply(event.reply)


def ask_again(turn: Turn, instance_id: str) -> None:
    """Suspensions that came before anybody had looked: somebody has, or it is gone, or starts anew."""
    asks = turn.state.early_asks.get(instance_id, ())
    turn.state = replace(turn.state, early_asks={k: a for k, a in turn.state.early_asks.items() if k != instance_id})
    for ask in asks:
        on_suspend(turn, SuspendCommand(ask.command, ask.reply))


def hold(turn: Turn, instance: Instance, until: float) -> None:
    """Write-lock it: gateways see that it drains, and its engine is asked to refuse what comes nevertheless."""
    instance = instance.model_copy(update={"state": InstanceState.DRAINING, "drain_until": until})
    turn.park(instance, holding=True, wake_asked=False)
    turn.emit(AskHold(instance.instance_id, only_if_idle=False))


def on_hold_answer(turn: Turn, event: HoldAnswered) -> None:
    """1. Whoever asked is answered. 2. Busy → asked again when the engine reports that it is idle. 3. It cannot be asked → stopped.
    4. Nobody wants it any more → it serves again. 5. Frozen."""
    instance = turn.find(event.instance_id)
    wanted = instance is not None and instance.process is Process.ALIVE and not instance.stop_asked
    if event.only_if_idle:  # 1
        asks = turn.state.hold_asks.get(event.instance_id, ())
        turn.state = replace(turn.state, hold_asks={k: a for k, a in turn.state.hold_asks.items() if k != event.instance_id})
        turn.emit(*(Reply(a.reply, event.error if wanted else None) for a in asks))
        if instance is None or not wanted or event.error is not None:
            return
        if instance.state is InstanceState.READY and asks:
            freeze(turn, instance)
        elif instance.state is InstanceState.READY:
            turn.emit(Resume(instance.instance_id, None))
        return
    if instance is None or not wanted or not instance.parking.holding:
        return
    if event.error is not None:
        if event.error.code != InstanceBusy.code:  # 3
            _give_up(turn, instance, event.error)
        elif instance.load.active + instance.load.waiting == 0:  # 2: it became idle before its answer came
            turn.emit(AskHold(instance.instance_id, only_if_idle=False))
        return
    freeze(turn, instance)  # 5


def on_idle_report(turn: Turn, instance: Instance) -> None:
    """An engine that drains for its suspension has reported that it serves nobody."""
    if instance.parking.holding and not instance.stop_asked and instance.load.active + instance.load.waiting == 0:
        turn.emit(AskHold(instance.instance_id, only_if_idle=False))


def freeze(turn: Turn, instance: Instance) -> None:
    """Recorded first: an agent that finds this and a frozen group knows what was going on."""
    outlook = instance.parking.outlook
    if why_not(turn.state, instance) or not make_room(turn, outlook.snapshot_bytes, instance.instance_id):
        _give_up(turn, instance, EngineFailed(why_not(turn.state, instance) or "no room for its snapshot").body())
        return
    assert outlook.way is not None
    instance = instance.model_copy(update={"state": InstanceState.DRAINING, "drain_until": None})
    turn.park(instance, holding=False, freezing=True, begun_at=turn.now, snapshot_bytes=outlook.snapshot_bytes)
    turn.emit(Suspend(instance.instance_id, outlook.way))


def on_suspended(turn: Turn, event: Suspended) -> None:
    """Its memory was read back: what is free is given away from here on, and nowhere else."""
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or not instance.parking.freezing or instance.stop_asked:
        return
    if instance.state is not InstanceState.DRAINING:
        return
    p, command = instance.parking, instance.command
    turn.books(turn.state.ledger.rebook(instance.instance_id, command.device_ids, event.left_bytes))
    # The builtin engine's KV cache grows as it is used: measured when idle it would look too small.
    # What it used at most counts: after a resumption only what it has touched since is in use, and on cpu the rest is in swap.
    held = event.left_bytes + event.snapshot_bytes if p.outlook.way == "cpu" else event.used_bytes
    most = max(held, event.used_bytes, p.used_bytes, p.base_bytes)
    need = max(most, command.reserve_bytes) if command.card.spec.engine == "builtin" else most
    state = InstanceState.ASLEEP if p.outlook.way == "sleep" else InstanceState.SUSPENDED
    instance = instance.model_copy(update={"state": state, "load": EngineLoad(completed=instance.load.completed), "phase": None})
    turn.park(
        instance,
        frees_bytes=event.freed_bytes,
        left_bytes=event.left_bytes,
        snapshot_bytes=event.snapshot_bytes,
        spilled="",
        need_bytes=need,
        used_bytes=most,
        base_bytes=most if p.resumes <= 1 else p.base_bytes,
        suspended=Lap(at=turn.now, took_s=turn.now - p.begun_at),
        outlook=p.outlook.model_copy(update={"snapshot_bytes": event.snapshot_bytes, "left_bytes": event.left_bytes}),
        wake_asked=False,
    )
    make_room(turn, 0, "")
    instance = turn.state.instances[instance.instance_id]
    if p.wake_asked and not instance.stop_asked:
        refused = resuming.reserve_and_resume(turn, instance, wait_s=0.0, priority=0)
        if refused is not None:
            # Its resumption was promised: whoever waits for it is told by the status, as of one that waited in vain.
            turn.park(instance, no_room=refused.model_copy(update={"param": RESERVATION}))


def on_suspend_failed(turn: Turn, event: SuspendFailed) -> None:
    """It runs as before. Somebody wants it by now → it serves again; otherwise it is stopped."""
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or not instance.parking.freezing:
        return
    instance = turn.park(instance, freezing=False, snapshot_bytes=0)
    if instance.stop_asked:
        return
    if instance.parking.wake_asked:
        resuming.serve_again(turn, instance)
        return
    _give_up(turn, instance, event.error)


def _give_up(turn: Turn, instance: Instance, error: ErrorBody) -> None:
    """It is stopped instead, as it would have been without any of this; why is told from then on."""
    outlook = instance.parking.outlook.model_copy(update={"way": None, "reason": error.message})
    left = max(0.0, instance.drain_until - turn.now) if instance.drain_until is not None else 0.0
    instance = turn.park(instance, holding=False, freezing=False, snapshot_bytes=0, outlook=outlook)
    stopping.begin(turn, instance, left or turn.state.policy.kill_grace_s, f"it could not be suspended: {error.message}")


# The snapshot budget.


def make_room(turn: Turn, wanted: int, but: str) -> bool:
    """Have the coldest suspended instances fall, to disk where what they keep is host memory that can go to swap, else to stopped, until
    `wanted` more bytes are within the budget; whether they are then. What page-out keeps is in swap already: there is nothing to write."""
    while turn.state.snapshots_kept(but) + wanted > turn.state.snapshot_budget:
        parked = [
            i
            for i in turn.state.instances.values()
            if i.state.parked
            and not i.stop_asked
            and i.instance_id != but
            and i.parking.spilled != "writing"
            and i.parking.snapshot_bytes
        ]
        if not parked:
            return False
        coldest = min(parked, key=lambda i: (i.parking.suspended.at if i.parking.suspended else 0.0, i.instance_id))
        way = coldest.parking.outlook.way
        if turn.state.spills and way in IN_HOST_MEMORY and not coldest.parking.spilled:
            turn.park(coldest, spilled="writing")
            turn.emit(Spill(coldest.instance_id, way))
        else:
            stopping.begin(turn, coldest, 0.0, "the coldest, and the node's snapshot budget is used up")
    return True


def on_spilled(turn: Turn, event: Spilled) -> None:
    """What is in swap now is not in host memory any more. If it could not be written the budget is looked at again, without that."""
    instance = turn.find(event.instance_id)
    if instance is None or instance.parking.spilled != "writing":
        return
    if event.error is None:
        left = max(0, instance.parking.snapshot_bytes - event.freed_bytes)
        turn.park(instance, spilled="written", snapshot_bytes=left)
    else:
        turn.park(instance, spilled="refused")
        make_room(turn, 0, "")


# What is found out.


def on_assessed(turn: Turn, event: Assessed) -> None:
    """1. The first look since its start: what it uses now is what a leak is told by, and it is parked if it was started for that.
    2. Whoever wanted it suspended before gets that, or a stop."""
    instance = turn.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE:
        return
    p = instance.parking
    outlook = event.outlook
    if p.resumes and outlook.way == p.outlook.way:
        outlook = outlook.model_copy(update={"left_bytes": p.left_bytes or outlook.left_bytes})
    first = p.base_bytes == 0
    used = {"used_bytes": max(p.used_bytes, event.used_bytes)}
    # What it has grown to by its first resumption is what it needs; what comes after that is leaked.
    base = max(p.base_bytes, event.used_bytes) if p.resumes <= 1 else p.base_bytes
    turn.park(instance, outlook=outlook, base_bytes=base, **used)
    _book_measured(turn, turn.state.instances[event.instance_id], event.used_bytes)
    instance = turn.state.instances[event.instance_id]
    if first and instance.command.park and instance.state is InstanceState.READY and not why_not(turn.state, instance):  # 1
        hold(turn, instance, turn.now + turn.state.policy.kill_grace_s)
    ask_again(turn, event.instance_id)  # 2


def on_measured(turn: Turn, event: Measured) -> None:
    instance = turn.find(event.instance_id)
    if instance is not None and instance.process is Process.ALIVE and instance.state is InstanceState.READY:
        _book_measured(turn, instance, event.used_bytes)


def _book_measured(turn: Turn, instance: Instance, used: int) -> None:
    """Bytes that an engine took far beyond its booking are booked to it too: they are not there for others."""
    booked = turn.state.ledger.bookings.get(instance.instance_id)
    total = booked.bytes_each * len(booked.device_ids) if booked is not None else 0
    if booked is not None and used > LEAK_FACTOR * total and used > total + LEAK_FLOOR:
        turn.books(turn.state.ledger.rebook(instance.instance_id, booked.device_ids, used))
        turn.park(instance, need_bytes=used, used_bytes=used)


def _dequeue(turn: Turn, instance_id: str) -> None:
    turn.state = replace(turn.state, queue=tuple(r for r in turn.state.queue if r.instance_id != instance_id))


def _mib(value: int) -> str:
    return f"{value / 2**20:.0f} MiB"
