"""Stop instances without eviction.

Those of removed or changed models, on drained nodes, past their keep-alive, starts without demand,
and surplus starts for migrations that have ended. So are those of a model that was put to sleep
while the scheduler did not know of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.demand.replica_targets import count_running, list_lasting
from services.scheduler.domain.estimates.start_times import resumes_faster
from services.scheduler.domain.lifecycle.park_attempts import TRIGGER, record_park_impossible
from services.scheduler.domain.lifecycle.suspension import prefer_suspend
from services.scheduler.domain.lifecycle.transitions import stop_instance
from services.scheduler.domain.state.entities import MIGRATE, Instance, Leaving, Model
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.node import InstanceState


def scale_down(tx: Transaction, instances: Iterable[Instance]) -> None:
    """Stop those of `instances` that have a reason to."""
    for i in instances:
        if i.leaving == "no" and (order := stop_reason(tx, i)) is not None:
            stop_instance(tx, i, *order)


def stop_reason(tx: Transaction, i: Instance) -> tuple[Leaving, str] | None:
    """Return how and why the instance is to stop now; None: it stays."""
    model = tx.state.models.get(i.model)
    if model is None:
        return "drain", "its model was removed"
    ready = i.state is InstanceState.READY
    idle = tx.idle_since(i.instance_id)
    may_ask = ready and idle is not None and _is_reported(tx, i) and not tx.is_cooling_down(i.instance_id)
    if i.generation != model.card.generation:
        if not ready:
            return "drain", "its model was changed"
        return ("if_idle", "its model was changed") if may_ask else None
    node = tx.state.find_drained_node(i)
    if node is not None and node.drain_since is not None:
        if not ready or tx.now - node.drain_since > tx.policy.drain_timeout_s:
            return "drain", f"{node.name} is drained"
        return ("if_idle", f"{node.name} is drained") if may_ask else None
    if tx.state.inbound_migration(i.instance_id) is not None:
        return None
    if i.state.parked or (i.state is InstanceState.RESUMING and not i.is_claim):
        return None  # a suspended instance costs little there and resumes sooner than a new one starts
    if i.trigger == TRIGGER and may_ask and (order := _parks(tx, i)) is not None:
        return order
    if not ready:
        if _is_surplus_destination(tx, i, model):
            return "drain", "the migration that it was started for has ended"
        return ("drain", "no request waits for it") if _is_unwanted(tx, i, model) else None
    if may_ask and _is_surplus_destination(tx, i, model) and not _may_be_wanted(tx, model):
        return "if_idle", "the migration that it was started for has ended"
    if model.sleep_requested and i.trigger != TRIGGER and not tx.state.waiting_count(model.key):
        return prefer_suspend(tx, i, "drain"), "its model was put to sleep"
    if may_ask and idle is not None and _idle_too_long(tx, i, model, idle):
        return prefer_suspend(tx, i, "if_idle") if resumes_faster(tx.state, i) else "if_idle", "idle for longer than keep_alive"
    return None


def _parks(tx: Transaction, i: Instance) -> tuple[Leaving, str] | None:
    """Decide about an instance that was started to be parked.

    1. A request has arrived: it stays like any other.
    2. Its node can suspend it: suspend it.
    3. Its node cannot: stop it and do not try again.
    """
    report = tx.state.reports.get(i.instance_id)
    if report is None or tx.state.waiting_count(i.model) or report.status.load.completed:  # 1
        return None
    if report.status.suspension.possible:  # 2
        return "suspend_if_idle", "parked before its first request"
    if i.ready_at is not None and tx.now - i.ready_at > tx.policy.park_timeout_s:  # 3
        reason = report.status.suspension.reason or "its node cannot suspend it"
        record_park_impossible(tx, i.model, reason)
        return "if_idle", f"it cannot be parked: {reason}"
    return None


def _is_surplus_destination(tx: Transaction, i: Instance, model: Model) -> bool:
    """True for an instance that was to be a destination, if the model has enough without it.

    No migration has it as its destination: that ended, or its leader ended before it was ordered.
    Nor is it the source of a later one, whose destination takes its place once that is done.
    Instances on drained nodes do not count, as they leave.
    """
    if i.trigger != MIGRATE or any(m.source == i.instance_id for m in tx.state.migrations.values()):
        return False
    lasting = list_lasting(tx, model, tx.state.live_instances(model))
    return sum(tx.state.find_drained_node(x) is None for x in lasting) > model.card.spec.replicas.max


def _is_reported(tx: Transaction, i: Instance) -> bool:
    """True if its node has reported lately: an instance whose reports are old may serve again."""
    presence = tx.state.presence.get(i.node)
    return presence is not None and tx.now - presence.last_message_at <= tx.policy.node_lost_after_s


def _may_be_wanted(tx: Transaction, model: Model) -> bool:
    """True if requests wait for the model, or a new leader may not have read them yet."""
    return tx.state.waiting_count(model.key) > 0 or tx.now - tx.state.recovered_at < tx.policy.demand_grace_s


def _is_unwanted(tx: Transaction, i: Instance, model: Model) -> bool:
    """True for a start without demand; gateways first get time to repeat theirs to a new leader."""
    if model.card.spec.park and len(tx.state.live_instances(model)) == 1:
        return False  # it is to be parked anyway
    if _may_be_wanted(tx, model):
        return False
    report = tx.state.reports.get(i.instance_id)
    if report is not None and (report.status.load.active or report.status.load.waiting):
        return False  # its requests compute while its weights arrive
    takes_requests = report is not None and report.status.accepts_requests
    if takes_requests and (demand := tx.state.demand.get(model.key)) and demand.in_flight:
        return False
    live = tx.state.live_instances(model)
    if i.trigger == "replicas" and count_running(tx, model, live):
        return False
    return len(live) > model.min_replicas


def _idle_too_long(tx: Transaction, i: Instance, model: Model, idle: float) -> bool:
    spec = model.card.spec
    kept = tx.state.keep_alive_s(i, model)
    if spec.pin or kept < 0 or tx.state.waiting_count(model.key):
        return False
    if tx.now - max(idle, i.ready_at or idle) < max(kept, tx.policy.min_idle_s):
        return False
    ready = sum(1 for other in tx.state.live_instances(model) if other.state is InstanceState.READY)
    return ready > model.min_replicas
