"""Stopping an instance: drain, SIGTERM, SIGKILL."""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain import teardown, termination
from services.nodeagent.domain.events import DrainAnswered, Measure, Reply, RequestDrain, Shutdown, StopCommand
from services.nodeagent.domain.fencing import check_stale
from services.nodeagent.domain.state import IdleWaiter, Instance, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.node import InstanceState


def on_stop(transition: Transition, event: StopCommand) -> None:
    """Handle a stop command.

    1. Stale: refused.
    2. Unknown, exited or failed: done.
    3. Only if idle, and ready: the engine decides, and its answer is the reply.
    4. Otherwise it drains; an instance that serves no request yet is killed.
    """
    command, instance = event.command, transition.find(event.command.instance_id)
    refused = check_stale(transition, command.token, instance)
    if refused is not None:  # 1
        transition.reply(event.reply, refused)
        return
    if instance is None or instance.process is Process.GONE or instance.state is InstanceState.FAILED:  # 2
        transition.reply(event.reply)
        return
    instance = transition.put(instance.model_copy(update={"token": command.token}))
    timeout_s = command.drain_timeout_ms / 1000
    if command.only_if_idle and instance.state is InstanceState.READY:  # 3
        asks = transition.state.idle_waiters.get(instance.instance_id, ())
        asked = {**transition.state.idle_waiters, instance.instance_id: (*asks, IdleWaiter(event.reply, timeout_s))}
        transition.state = replace(transition.state, idle_waiters=asked)
        transition.emit(Measure(instance.instance_id), RequestDrain(instance.instance_id, only_if_idle=True, reason=command.reason))
        return
    begin(transition, instance, timeout_s, command.reason)  # 4
    transition.reply(event.reply)


def begin(transition: Transition, instance: Instance, timeout_s: float, reason: str) -> None:
    """Stop the instance within `timeout_s`.

    A second call can only shorten the deadline. An instance without requests is killed at once.
    """
    if instance.process is Process.QUEUED:
        transition.dequeue(instance.instance_id)
        teardown.free(transition, teardown.mark_gone(transition, transition.change(instance, stop_asked=True), None))
        return
    # Requests may compute while the weights arrive, and while a pause is undone.
    was_paused = instance.state is InstanceState.RESUMING and not instance.suspend_state.freezing
    is_serving = (instance.accepts_requests or was_paused) and bool(instance.load.active or instance.load.waiting)
    if (instance.state.starting and not is_serving) or instance.state.parked or instance.suspend_state.freezing:
        transition.dequeue(instance.instance_id)
        termination.kill(transition, transition.change(instance, stop_asked=True, state=InstanceState.DRAINING, phase=None))
        return
    until = min(transition.now + timeout_s, instance.drain_until if instance.drain_until is not None else float("inf"))
    first = not instance.stop_asked
    instance = instance.model_copy(update={"suspend_state": instance.suspend_state.model_copy(update={"pausing": False})})
    # After SIGTERM the kill deadline is earlier than any drain deadline.
    until_or_killed = until if instance.kill_at is None else None
    instance = transition.change(instance, stop_asked=True, state=InstanceState.DRAINING, drain_until=until_or_killed)
    if first:
        transition.emit(Measure(instance.instance_id), RequestDrain(instance.instance_id, only_if_idle=False, reason=reason))


def on_drain_answered(transition: Transition, event: DrainAnswered) -> None:
    instance = transition.find(event.instance_id)
    if event.only_if_idle:
        asks = transition.state.idle_waiters.get(event.instance_id, ())
        transition.state = replace(
            transition.state, idle_waiters={k: a for k, a in transition.state.idle_waiters.items() if k != event.instance_id}
        )
        gone = instance is None or instance.process is Process.GONE
        leaving = event.error is None or gone or (instance is not None and instance.stop_asked)
        if leaving and asks and instance is not None and not gone and not instance.stop_asked:
            until = transition.now + min(a.drain_timeout_s for a in asks)
            transition.change(instance, stop_asked=True, state=InstanceState.DRAINING, drain_until=until)
        transition.emit(*(Reply(a.reply, None if leaving else event.error) for a in asks))
    elif event.error is not None and instance is not None and instance.process is Process.ALIVE and instance.stop_asked:
        # The engine does not answer, or cannot drain.
        termination.terminate(transition, instance)


def on_drain_timeout(transition: Transition, instance: Instance) -> None:
    """The drain deadline has passed: running requests are aborted.

    A suspension that is still waiting for idleness becomes a stop.
    """
    if instance.suspend_state.pausing:
        suspend_state = instance.suspend_state.model_copy(update={"pausing": False})
        instance = transition.change(instance, stop_asked=True, suspend_state=suspend_state)
    termination.terminate(transition, instance)


def on_shutdown(transition: Transition, event: Shutdown) -> None:
    """Drain all instances: the agent is shutting down."""
    transition.state = replace(transition.state, stopping=True)
    for instance in transition.state.list_live():
        if instance.process is not Process.GONE and instance.state is not InstanceState.FAILED:
            begin(transition, instance, event.timeout_s, "the node is shutting down")
