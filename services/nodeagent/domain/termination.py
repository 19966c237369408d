"""Ending an engine's process: SIGTERM, then SIGKILL."""

from __future__ import annotations

from services.nodeagent.domain.events import Measure, Signal
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Transition


def terminate(transition: Transition, instance: Instance) -> None:
    """Send SIGTERM, and SIGKILL after the grace period.

    No effect if already in progress. Before the fork is confirmed nothing is sent; `on_forked`
    kills the process then.
    """
    if instance.process is not Process.ALIVE or instance.kill_at is not None:
        transition.put(instance.model_copy(update={"drain_until": None}))
        return
    transition.change(instance, drain_until=None, adopt_until=None, kill_at=transition.now + transition.state.policy.kill_grace_s)
    transition.emit(Measure(instance.instance_id), Signal(instance.instance_id, "term"))


def kill(transition: Transition, instance: Instance) -> None:
    """Send SIGKILL, again after each grace period until the process has exited."""
    if instance.process is not Process.ALIVE:
        return
    transition.change(instance, drain_until=None, adopt_until=None, kill_at=transition.now + transition.state.policy.kill_grace_s)
    transition.emit(Measure(instance.instance_id), Signal(instance.instance_id, "kill"))
