"""Ending an engine's process: SIGTERM, then SIGKILL."""

from __future__ import annotations

from services.nodeagent.domain.events import Measure, Signal
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Turn


def terminate(turn: Turn, instance: Instance) -> None:
    """SIGTERM, and SIGKILL when the grace is over. Harmless when under way, and before the fork is known (then `on_forked` kills)."""
    if instance.process is not Process.ALIVE or instance.kill_at is not None:
        turn.put(instance.model_copy(update={"drain_until": None}))
        return
    turn.change(instance, drain_until=None, adopt_until=None, kill_at=turn.now + turn.state.policy.kill_grace_s)
    turn.emit(Measure(instance.instance_id), Signal(instance.instance_id, "term"))


def kill(turn: Turn, instance: Instance) -> None:
    """SIGKILL, again after each grace until the process is gone."""
    if instance.process is not Process.ALIVE:
        return
    turn.change(instance, drain_until=None, adopt_until=None, kill_at=turn.now + turn.state.policy.kill_grace_s)
    turn.emit(Measure(instance.instance_id), Signal(instance.instance_id, "kill"))
