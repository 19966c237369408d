"""Beginnings and ends of instances: what a start, a stop, a success and a failure change, and what they have sent."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.domain.draft import Draft
from services.scheduler.domain.effects import (
    LoadEnded,
    LoadStarted,
    PublishLoadFailed,
    ReplyTo,
    SendPrepare,
    SendRelease,
    SendStart,
    SendStop,
)
from services.scheduler.domain.entities import (
    Estimate,
    Instance,
    Leaving,
    Model,
    ModelDemand,
    Pause,
    Pressure,
    Seen,
    Trouble,
    Unmet,
    Waiter,
)
from services.scheduler.domain.estimates import learned
from services.scheduler.domain.placement import Placement
from shared.contracts.admin import ModelAwake
from shared.contracts.base import ErrorBody
from shared.contracts.demand import LoadFailed
from shared.contracts.loader import PrepareWeights, ReleaseWeights
from shared.contracts.node import InstanceState, InstanceStatus, StartInstance, StopInstance
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.plans import PlanRecord
from shared.errors import InvalidModel, from_body
from shared.sizing import need_of

MAX_ATTEMPTS = 2


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
    """The bytes are there: have the nodeagent start it and the loader fetch its weights at the same time."""
    model = d.state.models[instance.model]
    sent = replace(instance, sent_at=d.now, token=d.token())
    d.put(sent)
    d.emit(
        SendPrepare(
            sent.node, PrepareWeights(token=sent.token, instance_id=sent.instance_id, card=model.card, traceparent=sent.traceparent)
        )
    )
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
        d.put(learned(old, i.model, i.node, measured, was_resident))
        _finish_plan(
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
        _finish_plan(d, i, plan.model_copy(update=update))
    _tell_sleepers(d, i, (seen.status.freed_bytes if seen else None) or 0)


def _finish_plan(d: Draft, i: Instance, plan: PlanRecord) -> None:
    d.put(plan)
    d.emit(LoadEnded(plan, i.node, i.requested_at, d.now))


def _tell_sleepers(d: Draft, i: Instance, freed: int) -> None:
    for w in list(d.state.waiters.values()):
        if w.kind == "sleep" and i.instance_id in w.instances and i.instance_id not in w.gone:
            d.put(replace(w, gone=(*w.gone, i.instance_id), freed_bytes=w.freed_bytes + freed))


def start_failed(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A start failed: once more if that can help, else everybody who waits is told."""
    conclude(d, i, "failed" if i.leaving == "no" else "cancelled", error.message, error)
    _count_failure(d, i, error)


def stalled(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A start gets on no longer: as `start_failed`, but it is stopped first, and its bytes stay booked until they are proved free."""
    plan = d.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending":
        _finish_plan(d, i, plan.model_copy(update={"outcome": "failed", "error": error}))
    leave(d, i, "drain", error.message)
    _count_failure(d, i, error)


def _count_failure(d: Draft, i: Instance, error: ErrorBody) -> None:
    model = d.state.models.get(i.model)
    if model is None or i.leaving != "no" or i.generation != model.card.generation:
        return
    trouble = d.state.trouble.get(i.model) or Trouble(i.model)
    here = tuple(f"{i.node}/{device}" for device in i.device_ids)
    hopeless = isinstance(from_body(error), InvalidModel)
    if not hopeless and trouble.attempts + 1 < MAX_ATTEMPTS:
        d.put(replace(trouble, attempts=trouble.attempts + 1, avoid=trouble.avoid + here, error=error))
        d.put(replace(model, error=error.message))
        return
    give_up(d, model, error, i.plan_id)


def crashed(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A ready instance failed: the next demand starts another, `replicas.min` backs off if it keeps happening."""
    conclude(d, i, "failed", error.message, error)
    model = d.state.models.get(i.model)
    if model is None:
        return
    d.put(replace(model, error=error.message))
    trouble = d.state.trouble.get(i.model) or Trouble(i.model)
    quick = i.ready_at is not None and d.now - i.ready_at < d.policy.settled_after
    failures = trouble.failures + 1 if quick else 1
    d.put(replace(trouble, failures=failures, not_before=d.now + d.policy.backoff(failures), error=error))


def give_up(d: Draft, model: Model, error: ErrorBody, plan_id: str | None) -> None:
    """Nobody need wait any longer: the model cannot be made ready now. Its next request may try again."""
    trouble = d.state.trouble.get(model.key) or Trouble(model.key)
    failures = trouble.failures + 1
    d.put(Trouble(model.key, 0, (), failures, d.now, d.now + d.policy.backoff(failures), error))
    d.put(replace(model, error=error.message))
    d.emit(PublishLoadFailed(LoadFailed(model=model.key, plan_id=plan_id, error=error)))
    d.drop(ModelDemand, model.key)
    d.drop(Unmet, model.key)
    d.drop(Pressure, model.key)
    for w in list(d.state.waiters.values()):
        if w.kind == "wake" and w.model == model.key:
            d.drop(Waiter, w.waiter)
            d.emit(ReplyTo(w.waiter, error))


def refused(d: Draft, i: Instance) -> None:
    """The nodeagent had no room after all: the bytes are promised anew once its status tells what it has."""
    conclude(d, i, "cancelled", "the nodeagent refused the reservation")
    release(d, i)
    for device in i.device_ids:
        subject = f"{i.node}/{device}"
        d.put(Pause(subject, d.now + d.policy.shun_pause))


def release(d: Draft, i: Instance) -> None:
    d.emit(SendRelease(i.node, ReleaseWeights(instance_id=i.instance_id)))


def answer_awake(d: Draft, w: Waiter, ready: Instance) -> None:
    d.drop(Waiter, w.waiter)
    awake = ModelAwake(instance_id=ready.instance_id, plan_id=ready.plan_id, took_ms=(d.now - w.since) * 1e3)
    d.emit(ReplyTo(w.waiter, awake))
