"""Demand, heard as a level: what every gateway says waits for a model, and the answer to it."""

from __future__ import annotations

from operator import itemgetter

from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.events import DemandHeard
from services.scheduler.domain.state.accounting import booking
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.usage_history import Habit
from services.scheduler.domain.state.volatile import GatewayDemand, ModelDemand, Pressure
from services.scheduler.domain.values import replace
from shared.contracts.demand import DemandNoted
from shared.contracts.node import InstanceState
from shared.errors import ModelNotFound


def hear_demand(d: Draft, event: DemandHeard) -> None:
    heard = event.demand
    model = d.state.serving(heard.model)
    if model is None:
        return
    name = model.key
    asked_anew = bool(heard.waiting) and not d.state.waiting(name)
    since = event.at - heard.oldest_wait_ms / 1e3
    waiting = heard.waiting
    trouble = d.state.trouble.get(name)
    if trouble and trouble.failed_at is not None and since <= trouble.failed_at > d.now - d.policy.failure_echo:
        waiting = 0
    others = _others(d, name, heard.gateway)
    old = next((g for m in [d.state.demand.get(name)] if m for g in m.gateways if g.gateway == heard.gateway), None)
    parents = heard.traceparents
    if old is not None and old.waiting and waiting:
        parents = parents or old.traceparents
    entry = GatewayDemand(heard.gateway, waiting, heard.in_flight, since, event.at, parents, heard.window, heard.peak)
    _keep(d, name, (*others, entry) if waiting or heard.in_flight else others)
    if asked_anew:
        habit = d.state.habits.get(name)
        d.put(Habit(name, d.now) if habit is None else habit.again(d.now))


def _others(d: Draft, name: str, gateway: str) -> tuple[GatewayDemand, ...]:
    known = d.state.demand.get(name)
    return tuple(g for g in known.gateways if g.gateway != gateway) if known else ()


def _keep(d: Draft, name: str, gateways: tuple[GatewayDemand, ...]) -> None:
    if gateways:
        d.put(ModelDemand(name, gateways))
    else:
        d.drop(ModelDemand, name)
        d.drop(Pressure, name)
        if (trouble := d.state.trouble.get(name)) is not None:
            d.put(replace(trouble, attempts=0, killed=0, avoid=()))


def forget_old_demand(d: Draft) -> None:
    """A gateway that repeats its demand no longer is gone, and those who waited in it too."""
    for known in list(d.state.demand.values()):
        fresh = tuple(g for g in known.gateways if d.now - g.heard_at <= d.policy.demand_lost_after)
        if len(fresh) != len(known.gateways):
            _keep(d, known.model, fresh)


def answer_demand(d: Draft, event: DemandHeard) -> None:
    """Tell the gateway what to expect."""
    model = d.state.serving(event.demand.model)
    if model is None:
        name = event.demand.model
        d.emit(ReplyTo(event.waiter, ModelNotFound(f"no model {name!r} is registered; see `thaw models list`").body()))
        return
    live = d.state.live(model)
    if any(i.state is InstanceState.READY for i in live):
        d.emit(ReplyTo(event.waiter, DemandNoted(outlook="ready", eta_ms=0)))
        return
    if live:
        first, ms = min([(i, _left_ms(d, i)) for i in live], key=itemgetter(1))
        d.emit(ReplyTo(event.waiter, DemandNoted(outlook="starting", plan_id=first.plan_id, eta_ms=int(ms))))
        return
    unmet = d.state.unmet.get(model.key)
    plan = d.state.last_plan_of(model.key)
    reason = unmet.reason if unmet else (model.error or "")
    d.emit(ReplyTo(event.waiter, DemandNoted(outlook="waiting", plan_id=plan.plan_id if plan else None, reason=reason)))


def _left_ms(d: Draft, i: Instance) -> float:
    plan = d.state.plans.get(i.plan_id)
    predicted = plan.chosen.predicted_ms if plan and plan.chosen else None
    if predicted is None and (model := d.state.models.get(i.model)):
        booked = booking(d.state, i.node, i.device_ids[0])
        predicted = Forecast(d.state, model.card, d.now).on(booked, leaving=False)[1]
    return max(0.0, (predicted or 0.0) - (d.now - i.planned_at) * 1e3)
