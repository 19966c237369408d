"""Gateways' demand reports, which repeat the present level, and the replies to them."""

from __future__ import annotations

from operator import itemgetter

from services.scheduler.domain.demand.key_shares import begin_waiting
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.usage_history import UsageHistory
from services.scheduler.domain.state.volatile import GatewayDemand, ModelDemand, Overload
from services.scheduler.domain.values import replace
from shared.contracts.demand import DemandNoted
from shared.contracts.node import InstanceState
from shared.errors import ModelNotFound


def apply_demand(tx: Transaction, event: DemandReceived) -> None:
    reported = event.demand
    model = tx.state.serving_model(reported.model)
    if model is None:
        return
    name = model.key
    is_first_waiting = bool(reported.waiting) and not tx.state.waiting_count(name)
    since = event.at - reported.oldest_wait_ms / 1e3
    waiting = reported.waiting
    failure_history = tx.state.failures.get(name)
    if (
        failure_history
        and failure_history.failed_at is not None
        and since <= failure_history.failed_at > tx.now - tx.policy.failure_echo_s
    ):
        waiting = 0
    if waiting and model.sleep_requested:
        tx.put(replace(model, sleep_requested=False))
    others = _list_others(tx, name, reported.gateway)
    old = next((g for m in [tx.state.demand.get(name)] if m for g in m.gateways if g.gateway == reported.gateway), None)
    parents = reported.traceparents
    if old is not None and old.waiting and waiting:
        parents = parents or old.traceparents
    entry = GatewayDemand(
        reported.gateway,
        waiting,
        reported.in_flight,
        since,
        event.at,
        parents,
        reported.window,
        reported.peak,
        reported.keys if waiting else (),
    )
    before = tx.state.demand.get(name)
    _keep(tx, name, (*others, entry) if waiting or reported.in_flight else others)
    begin_waiting(tx, name, before)
    if is_first_waiting:
        usage = tx.state.usage_history.get(name)
        tx.put(UsageHistory(name, tx.now) if usage is None else usage.used_at(tx.now))


def _list_others(tx: Transaction, name: str, gateway: str) -> tuple[GatewayDemand, ...]:
    known = tx.state.demand.get(name)
    return tuple(g for g in known.gateways if g.gateway != gateway) if known else ()


def _keep(tx: Transaction, name: str, gateways: tuple[GatewayDemand, ...]) -> None:
    if gateways:
        tx.put(ModelDemand(name, gateways))
    else:
        tx.drop(ModelDemand, name)
        tx.drop(Overload, name)
        if (failure_history := tx.state.failures.get(name)) is not None:
            tx.put(replace(failure_history, attempts=0, kills=0, failed_devices=()))


def expire_demand(tx: Transaction, due: float) -> None:
    """Remove the demand of gateways that no longer repeat it.

    Args:
        due: The time of the tick. While it waited for its decision, messages of gateways waited
            too.
    """
    for known in list(tx.state.demand.values()):
        fresh = tuple(g for g in known.gateways if due - g.last_message_at <= tx.policy.demand_lost_after_s)
        if len(fresh) != len(known.gateways):
            _keep(tx, known.model, fresh)


def reply_to_demand(tx: Transaction, event: DemandReceived) -> None:
    """Reply to the gateway with the outlook of its demand."""
    model = tx.state.serving_model(event.demand.model)
    if model is None:
        name = event.demand.model
        tx.emit(ReplyTo(event.waiter, ModelNotFound(f"No model {name!r} is registered; see `thaw models list`").body()))
        return
    live = tx.state.live_instances(model)
    if any(i.state is InstanceState.READY for i in live):
        tx.emit(ReplyTo(event.waiter, DemandNoted(outlook="ready", eta_ms=0)))
        return
    if live:
        first, ms = min([(i, _left_ms(tx, i)) for i in live], key=itemgetter(1))
        tx.emit(ReplyTo(event.waiter, DemandNoted(outlook="starting", plan_id=first.plan_id, eta_ms=int(ms))))
        return
    waiting_model = tx.state.unschedulable.get(model.key)
    plan = tx.state.last_plan_of(model.key)
    reason = waiting_model.reason if waiting_model else (model.error or "")
    tx.emit(ReplyTo(event.waiter, DemandNoted(outlook="waiting", plan_id=plan.plan_id if plan else None, reason=reason)))


def _left_ms(tx: Transaction, i: Instance) -> float:
    plan = tx.state.plans.get(i.plan_id)
    predicted = plan.chosen.predicted_ms if plan and plan.chosen else None
    if predicted is None and (model := tx.state.models.get(i.model)):
        booked = booking_of(tx.state, i.node, i.device_ids[0])
        predicted = Forecast(tx.state, model.card, tx.now).predict_ms(booked, leaving=False)[1]
    return max(0.0, (predicted or 0.0) - (tx.now - i.planned_at) * 1e3)
