"""Which instances leave by themselves, and how: of removed or changed models, on drained nodes, past their keep-alive, unwanted starts."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.estimates.start_times import sooner_back
from services.scheduler.domain.lifecycle.park_attempts import TRIGGER, useless
from services.scheduler.domain.lifecycle.suspension import gently
from services.scheduler.domain.lifecycle.transitions import leave
from services.scheduler.domain.state.entities import Instance, Leaving, Model
from services.scheduler.domain.state.transaction import Draft
from shared.contracts.node import InstanceState


def retire(d: Draft, instances: Iterable[Instance]) -> None:
    """Have those of `instances` leave whose time has come."""
    for i in instances:
        if i.leaving == "no" and (order := must_leave(d, i)) is not None:
            leave(d, i, *order)


def must_leave(d: Draft, i: Instance) -> tuple[Leaving, str] | None:
    """How the instance, which has not been asked to, is to leave now, and why; None: it stays."""
    model = d.state.models.get(i.model)
    if model is None:
        return "drain", "its model was removed"
    ready = i.state is InstanceState.READY
    idle = d.idle_since(i.instance_id)
    may_ask = ready and idle is not None and not d.paused(i.instance_id)
    if i.generation != model.card.generation:
        if not ready:
            return "drain", "its model was changed"
        return ("if_idle", "its model was changed") if may_ask else None
    node = d.state.nodes.get(i.node)
    if node is not None and node.drain_since is not None:
        if not ready or d.now - node.drain_since > d.policy.drain_timeout:
            return "drain", f"{node.name} is drained"
        return ("if_idle", f"{node.name} is drained") if may_ask else None
    if d.state.move_to(i.instance_id) is not None:
        return None
    if i.state.parked or (i.state is InstanceState.RESUMING and not i.claim):
        return None  # it costs next to nothing there, and comes back sooner than it could be called off
    if i.trigger == TRIGGER and may_ask and (order := _parks(d, i)) is not None:
        return order
    if not ready:
        return ("drain", "nobody waits for it any more") if _unwanted(d, i, model) else None
    if may_ask and idle is not None and _idle_too_long(d, i, model, idle):
        return gently(d, i, "if_idle") if sooner_back(d.state, i) else "if_idle", "idle for longer than keep_alive"
    return None


def _parks(d: Draft, i: Instance) -> tuple[Leaving, str] | None:
    """1. Somebody asked meanwhile: it stays like any other. 2. Suspended. 3. Its node finds that it cannot be: stopped, and not tried again."""
    seen = d.state.seen.get(i.instance_id)
    if seen is None or d.state.waiting(i.model) or seen.status.load.completed:  # 1
        return None
    if seen.status.suspension.possible:  # 2
        return "suspend_if_idle", "parked ahead of its first request"
    if i.ready_at is not None and d.now - i.ready_at > d.policy.park_patience:  # 3
        reason = seen.status.suspension.reason or "its node cannot suspend it"
        useless(d, i.model, reason)
        return "if_idle", f"it cannot be parked: {reason}"
    return None


def _unwanted(d: Draft, i: Instance, model: Model) -> bool:
    """A start that nobody waits for. A new leader gives gateways the time to repeat their demand first."""
    if model.card.spec.park and len(d.state.live(model)) == 1:
        return False  # to be parked anyway
    if d.state.waiting(model.key) or d.now - d.state.recovered_at < d.policy.demand_settle:
        return False
    if i.trigger == "replicas" and (demand := d.state.demand.get(model.key)) and demand.in_flight:
        return False
    return len(d.state.live(model)) > model.floor


def _idle_too_long(d: Draft, i: Instance, model: Model, idle: float) -> bool:
    spec = model.card.spec
    kept = d.state.kept_for(i, model)
    if spec.pin or kept < 0 or d.state.waiting(model.key):
        return False
    if d.now - max(idle, i.ready_at or idle) < max(kept, d.policy.min_idle):
        return False
    ready = sum(1 for other in d.state.live(model) if other.state is InstanceState.READY)
    return ready > model.floor
