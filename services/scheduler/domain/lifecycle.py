"""Beginnings and ends of instances: what a start, a stop, a success and a failure change, and what they have sent."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.domain.draft import Draft
from services.scheduler.domain.effects import (
    LoadEnded,
    LoadStarted,
    ReplyTo,
    SendPrepare,
    SendRelease,
    SendStart,
    SendStop,
)
from services.scheduler.domain.entities import Instance, Leaving, Model
from services.scheduler.domain.estimates import NODES_KEPT, learned
from services.scheduler.domain.heard import Estimate, Pause, Seen, Waiter, estimate_key
from services.scheduler.domain.placement import Placement
from shared.contracts.admin import ModelAwake
from shared.contracts.base import ErrorBody
from shared.contracts.loader import PrepareWeights, ReleaseWeights
from shared.contracts.node import InstanceState, InstanceStatus, StartInstance, StopInstance
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord
from shared.sizing import need_of


def begin(d: Draft, model: Model, placement: Placement, trigger: str, since: float) -> None:
    """Promise the chosen device's bytes to a new instance, ask its victims to leave, and start it if nobody needs to."""
    chosen = placement.chosen
    if chosen is None:
        return
    number = d.token()
    waiting = d.state.last_plan_of(model.key)
    reuse = waiting is not None and waiting.outcome == "pending" and waiting.way == "wait"
    plan_id = waiting.plan_id if waiting and reuse else f"plan-{number:x}"
    need = need_of(model.card)
    instance = Instance(
        instance_id=f"i-{number:x}",
        plan_id=plan_id,
        model=model.key,
        generation=model.card.generation,
        revision=model.card.info.revision,
        node=chosen.node,
        device_ids=chosen.device_ids,
        token=number,
        reserve_bytes=need.total,
        kv_bytes=need.kv,
        requested_at=since,
        planned_at=d.now,
        trigger=trigger,
    )
    plan = PlanRecord(
        plan_id=plan_id,
        model=model.key,
        created=waiting.created if waiting and reuse else d.now,
        trigger=trigger,
        way=placement.way,
        chosen=chosen,
        candidates=placement.candidates,
        reason=placement.reason,
        instance_id=instance.instance_id,
    )
    d.put(plan)
    d.plans.append(plan)
    d.put(instance)
    demand = d.state.demand.get(model.key)
    d.emit(LoadStarted(plan_id, instance.instance_id, model.key, chosen.node, since, demand.traceparents if demand else ()))
    for victim in placement.victims:
        # One that has just refused as busy is known to serve, whatever its node reported last: asked for if idle it would refuse again.
        idle = d.idle_since(victim) is not None and not d.paused(victim)
        leave(d, d.state.instances[victim], "if_idle" if idle else "drain", f"makes room for {model.key}")
    if model.resting:
        d.put(replace(model, resting=False))


def send_start(d: Draft, instance: Instance) -> None:
    """The bytes are there: have the nodeagent start it and the loader fetch its weights (unless the engine does) at the same time."""
    model = d.state.models[instance.model]
    sent = replace(instance, sent_at=d.now, token=d.token())
    d.put(sent)
    if not model.card.spec.loads_itself:
        prepare = PrepareWeights(token=sent.token, instance_id=sent.instance_id, card=model.card, traceparent=sent.traceparent)
        d.emit(SendPrepare(sent.node, prepare))
    command = StartInstance(
        token=sent.token,
        plan_id=sent.plan_id,
        instance_id=sent.instance_id,
        card=model.card,
        device_ids=sent.device_ids,
        reserve_bytes=sent.reserve_bytes,
        kv_bytes=sent.kv_bytes,
        traceparent=sent.traceparent,
    )
    d.emit(SendStart(sent.node, command, sent.requested_at, sent.planned_at, d.now > sent.planned_at))


def leave(d: Draft, i: Instance, how: Leaving, reason: str) -> None:
    """Ask an instance to leave: if it is idle, or after it finished what it runs. A claim just ends."""
    if i.claim:
        conclude(d, i, "cancelled", reason)
        return
    if i.leaving == how or i.leaving == "drain":
        return
    asked = replace(i, leaving=how, leave_reason=reason, stop_at=d.now)
    d.put(asked)
    send_stop(d, asked)


def send_stop(d: Draft, i: Instance) -> None:
    d.put(replace(i, stop_at=d.now))
    command = StopInstance(
        token=d.token(),
        instance_id=i.instance_id,
        only_if_idle=i.leaving == "if_idle",
        drain_timeout_ms=int(d.policy.drain_timeout * 1e3),
        reason=i.leave_reason,
    )
    d.emit(SendStop(i.node, command))


def became_ready(d: Draft, i: Instance, status: InstanceStatus) -> None:
    """A start succeeded: its plan gets what was measured, the estimates learn from it, those who waited for it are answered."""
    d.put(replace(i, state=InstanceState.READY, ready_at=d.now))
    plan = d.state.plans.get(i.plan_id)
    measured = on_plan_clock(status.phases, d.now - i.requested_at)
    if plan is not None and plan.outcome == "pending":
        was_resident = plan.chosen is not None and plan.chosen.predicted.get(Phase.LOAD.value) == 0.0
        old = d.state.estimates.get(Estimate(i.model, i.node).key)
        known = d.state.measured_on.get(i.model, ())
        if old is None and len(known) >= NODES_KEPT:
            d.drop(Estimate, estimate_key(i.model, known[0]))
        d.put(learned(old, i.model, i.node, measured, was_resident))
        finish_plan(
            d, i, plan.model_copy(update={"outcome": "ready", "measured": measured, "measured_ms": (d.now - i.requested_at) * 1e3})
        )
    if model := d.state.models.get(i.model):
        d.put(replace(model, error=None))
    if trouble := d.state.trouble.get(i.model):
        d.put(replace(trouble, attempts=0, avoid=()))


def on_plan_clock(spans: tuple[PhaseSpan, ...], age: float) -> tuple[PhaseSpan, ...]:
    """Spans relative to now, as milliseconds since the plan's demand was heard, `age` seconds ago."""
    return tuple(s.model_copy(update={"start_ms": s.start_ms + age * 1e3}) for s in spans)


def conclude(d: Draft, i: Instance, outcome: str, reason: str = "", error: ErrorBody | None = None) -> None:
    """The instance is gone (or never came to be). A plan still pending gets `outcome`."""
    d.drop(Instance, i.instance_id)
    d.drop(Pause, i.instance_id)
    seen = d.state.seen.get(i.instance_id)
    d.drop(Seen, i.instance_id)
    plan = d.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        update: dict[str, object] = {"outcome": outcome, "error": error}
        if seen:
            update["measured"] = on_plan_clock(seen.status.phases, d.now - i.requested_at)
        if reason:
            update["reason"] = f"{plan.reason}; {outcome}: {reason}"
        finish_plan(d, i, plan.model_copy(update=update))
    _tell_sleepers(d, i, (seen.status.freed_bytes if seen else None) or 0)


def finish_plan(d: Draft, i: Instance, plan: PlanRecord) -> None:
    d.put(plan)
    d.emit(LoadEnded(plan, i.node, i.requested_at, d.now))


def _tell_sleepers(d: Draft, i: Instance, freed: int) -> None:
    for w in list(d.state.waiters.values()):
        if w.kind == "sleep" and i.instance_id in w.instances and i.instance_id not in w.gone:
            d.put(replace(w, gone=(*w.gone, i.instance_id), freed_bytes=w.freed_bytes + freed))


def release(d: Draft, i: Instance) -> None:
    d.emit(SendRelease(i.node, ReleaseWeights(instance_id=i.instance_id)))


def answer_awake(d: Draft, w: Waiter, ready: Instance) -> None:
    d.drop(Waiter, w.waiter)
    awake = ModelAwake(instance_id=ready.instance_id, plan_id=ready.plan_id, took_ms=(d.now - w.since) * 1e3)
    d.emit(ReplyTo(w.waiter, awake))
