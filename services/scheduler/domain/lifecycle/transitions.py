"""Beginnings and ends of instances: what a start, a stop, a success and a failure change, and what they have sent."""

from __future__ import annotations

from services.scheduler.domain.demand.slo import count_late
from services.scheduler.domain.effects import (
    LoadEnded,
    LoadStarted,
    ReplyTo,
    SendPrepare,
    SendRelease,
    SendResume,
    SendStart,
    SendStop,
    SendSuspend,
)
from services.scheduler.domain.estimates.memory_needs import need_to_start
from services.scheduler.domain.estimates.start_times import NODES_KEPT, learnt, sooner_back
from services.scheduler.domain.lifecycle.suspension import gently, make_way, park
from services.scheduler.domain.placement.place import Placement
from services.scheduler.domain.state.device_memory import need_bytes
from services.scheduler.domain.state.entities import Instance, Leaving, Model
from services.scheduler.domain.state.migrations import Move
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import ANYWHERE, Estimate, Pause, Seen, Waiter, estimate_key
from services.scheduler.domain.values import replace, unchecked
from shared.contracts import subjects
from shared.contracts.admin import ModelAwake
from shared.contracts.base import ErrorBody
from shared.contracts.loader import PrepareWeights, ReleaseWeights
from shared.contracts.node import InstanceState, InstanceStatus, ResumeInstance, StartInstance, StopInstance, SuspendInstance
from shared.contracts.phases import PhaseSpan
from shared.contracts.plans import Candidate, PlanRecord
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
    if placement.resume is None:
        instance = _new(d, model, chosen, plan_id, number, trigger, since)
    else:
        instance = _comes_back(d, placement.resume, plan_id, number, trigger, since)
    plan = unchecked(
        PlanRecord,
        {
            "plan_id": plan_id,
            "model": model.key,
            "created": waiting.created if waiting and reuse else d.now,
            "trigger": trigger,
            "way": placement.way,
            "chosen": chosen,
            "candidates": placement.candidates,
            "reason": placement.reason,
            "instance_id": instance.instance_id,
            "outcome": "pending",
            "measured": (),
            "measured_ms": None,
            "error": None,
            "traceparent": None,
        },
    )
    d.put(plan)
    d.plans.append(plan)
    d.put(instance)
    demand = d.state.demand.get(model.key)
    d.emit(LoadStarted(plan_id, instance.instance_id, model.key, chosen.node, since, demand.traceparents if demand else ()))
    if placement.victims:
        _clear(d, [d.state.instances[v] for v in placement.victims], placement.short, f"makes room for {model.key}")
    for victim, device in placement.moves:
        node, _, device_id = device.partition("/")
        source = d.state.instances[victim]
        key = f"m-{d.token():x}"
        d.put(Move(key, source.model, victim, d.now, "placement", node=node, device=device_id, plan_id=plan_id))
    if model.resting and trigger != "park":
        d.put(replace(model, resting=False))


def _new(d: Draft, model: Model, chosen: Candidate, plan_id: str, number: int, trigger: str, since: float) -> Instance:
    return Instance(
        instance_id=subjects.instance_id(number, chosen.node),
        plan_id=plan_id,
        model=model.key,
        generation=model.card.generation,
        revision=model.card.info.revision,
        node=chosen.node,
        device_ids=chosen.device_ids,
        token=number,
        reserve_bytes=need_to_start(d.state, model.card, chosen.device_ids[0].partition(":")[0]),
        kv_bytes=need_of(model.card).kv,
        requested_at=since,
        planned_at=d.now,
        trigger=trigger,
    )


def _comes_back(d: Draft, instance_id: str, plan_id: str, number: int, trigger: str, since: float) -> Instance:
    parked = d.state.instances[instance_id]
    return replace(
        parked,
        state=InstanceState.RESUMING,
        reserve_bytes=need_bytes(d.state, parked),
        plan_id=plan_id,
        token=number,
        requested_at=since,
        planned_at=d.now,
        trigger=trigger,
        sent_at=None,
        ready_at=None,
    )


def _clear(d: Draft, victims: list[Instance], short: int, reason: str) -> None:
    """Have `victims` leave: suspended where that is possible, frees enough and is the sooner way back, else stopped."""
    suspended = make_way(d, victims, short, sooner_back)
    for victim in victims:
        # One that has just refused as busy is known to serve, whatever its node reported last: asked for if idle it would refuse again.
        idle = d.idle_since(victim.instance_id) is not None and not d.paused(victim.instance_id)
        how: Leaving = "if_idle" if idle else "drain"
        leave(d, victim, gently(d, victim, how) if suspended[victim.instance_id] else how, reason)


def send_start(d: Draft, instance: Instance) -> None:
    """The bytes are there: have the nodeagent start it and the loader fetch its weights (unless the engine does) at the same time. One that
    is suspended has all it needs. While something else leaves its devices it may wait there for what is not free yet after all."""
    model = d.state.models[instance.model]
    sent = replace(instance, sent_at=d.now, token=d.token())
    d.put(sent)
    beside = (i for device in sent.device_ids for i in d.state.on_device(sent.node, device))
    wait_ms = int(d.policy.grant_wait * 1e3) if any(i.leaving != "no" for i in beside) else 0
    if sent.state is InstanceState.RESUMING:
        resume = ResumeInstance(
            token=sent.token,
            plan_id=sent.plan_id,
            instance_id=sent.instance_id,
            traceparent=sent.traceparent,
            priority=model.card.spec.priority,
            wait_ms=wait_ms,
        )
        d.emit(SendResume(sent.node, resume, sent.requested_at, sent.planned_at, d.now > sent.planned_at))
        return
    if not model.card.spec.loads_itself:
        # Engines of other makes take the weights from host memory.
        on_gpu = model.card.spec.engine == "builtin" and sent.device_ids[0].startswith("cuda:")
        prepare = PrepareWeights(
            token=sent.token,
            instance_id=sent.instance_id,
            card=model.card,
            traceparent=sent.traceparent,
            device=sent.device_ids[0] if on_gpu else None,
        )
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
        priority=model.card.spec.priority,
        wait_ms=wait_ms,
    )
    d.emit(SendStart(sent.node, command, sent.requested_at, sent.planned_at, d.now > sent.planned_at))


def leave(d: Draft, i: Instance, how: Leaving, reason: str) -> None:
    """Ask an instance to leave: if it is idle, or after it finished what it runs. A claim just ends; a suspended one is suspended still."""
    if i.resumes:
        stays_suspended(d, i, reason)
        return
    if i.claim:
        conclude(d, i, "cancelled", reason)
        return
    if i.leaving == how or i.leaving == "drain" or (i.leaving == "suspend" and how != "drain"):
        return
    asked = replace(i, leaving=how, leave_reason=reason, stop_at=d.now)
    d.put(asked)
    send_stop(d, asked)


def send_stop(d: Draft, i: Instance) -> None:
    """`StopInstance`, or `SuspendInstance` if it leaves so."""
    d.put(replace(i, stop_at=d.now))
    if i.leaving in ("suspend", "suspend_if_idle"):
        suspend = SuspendInstance(
            token=d.token(),
            instance_id=i.instance_id,
            only_if_idle=i.leaving == "suspend_if_idle",
            drain_timeout_ms=int(d.policy.drain_timeout * 1e3),
            reason=i.leave_reason,
        )
        d.emit(SendSuspend(i.node, suspend))
        return
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
    d.put(replace(i, state=InstanceState.READY, ready_at=d.now, sent_at=i.sent_at or d.now))
    plan = d.state.plans.get(i.plan_id)
    measured = on_plan_clock(status.phases, d.now - i.requested_at)
    if plan is not None and plan.outcome == "pending":
        chosen = plan.chosen.model_copy(update={"took_ms": (d.now - i.planned_at) * 1e3}) if plan.chosen is not None else None
        done = {"outcome": "ready", "chosen": chosen, "measured": measured, "measured_ms": (d.now - i.requested_at) * 1e3}
        ended = plan.model_copy(update=done)
        _learn(d, ended)
        finish_plan(d, i, ended)
    if model := d.state.models.get(i.model):
        count_late(d, i, model)
        d.put(replace(model, error=None))
    if trouble := d.state.trouble.get(i.model):
        d.put(replace(trouble, attempts=0, killed=0, avoid=()))


def _learn(d: Draft, plan: PlanRecord) -> None:
    for estimate in learnt(d.state, plan):
        known = d.state.measured_on.get(estimate.model, ())
        if estimate.node != ANYWHERE and estimate.key not in d.state.estimates and len(known) >= NODES_KEPT:
            d.drop(Estimate, estimate_key(estimate.model, known[0]))
        d.put(estimate)


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


def became_suspended(d: Draft, i: Instance, status: InstanceStatus) -> None:
    """Its memory is free, proved by its node."""
    park(d, i, status.state)
    plan = d.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        # Started to be parked, or suspended before anybody heard that it was ready.
        finish_plan(
            d, i, plan.model_copy(update={"outcome": "ready", "measured": on_plan_clock(status.phases, d.now - i.requested_at)})
        )
    _tell_sleepers(d, i, status.suspension.freed_bytes)


def stays_suspended(d: Draft, i: Instance, reason: str) -> None:
    """A suspended instance does not come back now after all: nobody wants it, or there is no room."""
    seen = d.state.seen.get(i.instance_id)
    state = seen.status.state if seen is not None and seen.status.state.parked else InstanceState.SUSPENDED
    plan = d.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        finish_plan(d, i, plan.model_copy(update={"outcome": "cancelled", "reason": f"{plan.reason}; cancelled: {reason}"}))
    park(d, replace(i, ready_at=i.ready_at or i.planned_at), state)


def answer_awake(d: Draft, w: Waiter, ready: Instance) -> None:
    d.drop(Waiter, w.waiter)
    awake = ModelAwake(instance_id=ready.instance_id, plan_id=ready.plan_id, took_ms=(d.now - w.since) * 1e3)
    d.emit(ReplyTo(w.waiter, awake))
