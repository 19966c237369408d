"""From a stop, or a failure, to a process that is gone: ask, then SIGTERM, then SIGKILL."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import teardown, termination
from services.nodeagent.domain.events import AskDrain, DrainAnswered, Measure, Reply, Shutdown, StopCommand
from services.nodeagent.domain.fencing import stale
from services.nodeagent.domain.state import IdleAsk, Instance, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.node import InstanceState


def on_stop(turn: Turn, event: StopCommand) -> None:
    """1. Stale → refused. 2. Unknown, gone or failing → done. 3. Only if idle and ready → the engine is asked, its answer is the reply.
    4. Otherwise it drains, or, where it serves nobody yet, is killed."""
    command, instance = event.command, turn.find(event.command.instance_id)
    refused = stale(turn, command.token, instance)
    if refused is not None:  # 1
        turn.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.state is InstanceState.FAILED:  # 2
        turn.reply(event.reply)
        return
    instance = turn.put(instance.model_copy(update={"token": command.token}))
    timeout_s = command.drain_timeout_ms / 1000
    if command.only_if_idle and instance.state is InstanceState.READY:  # 3
        asks = turn.state.idle_asks.get(instance.instance_id, ())
        asked = {**turn.state.idle_asks, instance.instance_id: (*asks, IdleAsk(event.reply, timeout_s))}
        turn.state = replace(turn.state, idle_asks=asked)
        turn.emit(Measure(instance.instance_id), AskDrain(instance.instance_id, only_if_idle=True, reason=command.reason))
        return
    begin(turn, instance, timeout_s, command.reason)  # 4
    turn.reply(event.reply)


def begin(turn: Turn, instance: Instance, timeout_s: float, reason: str) -> None:
    """Have it leave within `timeout_s`. A second call can only bring the end nearer. What serves nobody is killed at once."""
    if instance.process is Process.QUEUED:
        turn.state = replace(turn.state, queue=tuple(r for r in turn.state.queue if r.instance_id != instance.instance_id))
        teardown.free(turn, teardown.mark_gone(turn, turn.change(instance, stop_asked=True), None))
        return
    if instance.state.starting or instance.state.parked or instance.parking.freezing:
        turn.state = replace(turn.state, queue=tuple(r for r in turn.state.queue if r.instance_id != instance.instance_id))
        termination.kill(turn, turn.change(instance, stop_asked=True, state=InstanceState.DRAINING, phase=None))
        return
    until = min(turn.now + timeout_s, instance.drain_until if instance.drain_until is not None else float("inf"))
    first = not instance.stop_asked
    instance = instance.model_copy(update={"parking": instance.parking.model_copy(update={"holding": False})})
    # With SIGTERM under way the end is nearer than any drain's.
    until_or_killed = until if instance.kill_at is None else None
    instance = turn.change(instance, stop_asked=True, state=InstanceState.DRAINING, drain_until=until_or_killed)
    if first:
        turn.emit(Measure(instance.instance_id), AskDrain(instance.instance_id, only_if_idle=False, reason=reason))


def on_drain_answer(turn: Turn, event: DrainAnswered) -> None:
    instance = turn.find(event.instance_id)
    if event.only_if_idle:
        asks = turn.state.idle_asks.get(event.instance_id, ())
        turn.state = replace(turn.state, idle_asks={k: a for k, a in turn.state.idle_asks.items() if k != event.instance_id})
        gone = instance is None or instance.process is Process.GONE
        leaving = event.error is None or gone or (instance is not None and instance.stop_asked)
        if leaving and asks and instance is not None and not gone and not instance.stop_asked:
            until = turn.now + min(a.drain_timeout_s for a in asks)
            turn.change(instance, stop_asked=True, state=InstanceState.DRAINING, drain_until=until)
        turn.emit(*(Reply(a.reply, None if leaving else event.error) for a in asks))
    elif event.error is not None and instance is not None and instance.process is Process.ALIVE and instance.stop_asked:
        # It cannot be asked: it does not answer, or answers that it cannot.
        termination.terminate(turn, instance)


def drain_over(turn: Turn, instance: Instance) -> None:
    """Whoever is still served has had the time agreed on. One that was to be suspended is stopped: it is not idle."""
    if instance.parking.holding:
        parking = instance.parking.model_copy(update={"holding": False})
        instance = turn.change(instance, stop_asked=True, parking=parking)
    termination.terminate(turn, instance)


def on_shutdown(turn: Turn, event: Shutdown) -> None:
    turn.state = replace(turn.state, stopping=True)
    for instance in turn.state.live():
        if instance.process is not Process.GONE and instance.state is not InstanceState.FAILED:
            begin(turn, instance, event.timeout_s, "the node is shutting down")
