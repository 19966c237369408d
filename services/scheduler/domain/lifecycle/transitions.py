"""State transitions of instances, and the commands that they send."""

from __future__ import annotations

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
from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.estimates.start_learning import stage_estimates, updated_estimates
from services.scheduler.domain.estimates.start_times import NODES_KEPT, resumes_faster
from services.scheduler.domain.lifecycle.deliveries import mark_queued
from services.scheduler.domain.lifecycle.fetches import record_fetch
from services.scheduler.domain.lifecycle.full_workers import promise_full_workers, use_promise
from services.scheduler.domain.lifecycle.preemption import cleared_ms, find_cause, mark_preempted, record_cleared
from services.scheduler.domain.lifecycle.suspension import choose_suspensions, prefer_suspend, set_suspended
from services.scheduler.domain.placement.grants import granted_devices
from services.scheduler.domain.placement.options import Shortfalls
from services.scheduler.domain.placement.place import Placement
from services.scheduler.domain.state.device_memory import resume_need_bytes
from services.scheduler.domain.state.entities import CONSOLIDATION, Instance, Leaving, Model
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate, estimate_key
from services.scheduler.domain.state.migrations import Migration
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown, Delivery, InstanceReport, LaterStage, Waiter
from services.scheduler.domain.values import create_unchecked, replace
from shared.contracts import subjects
from shared.contracts.admin import ModelAwake
from shared.contracts.base import ErrorBody
from shared.contracts.loader import PrepareWeights, ReleaseWeights
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, InstanceStatus, ResumeInstance, StartInstance, StopInstance, SuspendInstance
from shared.contracts.phases import PhaseSpan
from shared.contracts.plans import Candidate, PlanRecord
from shared.contracts.stages import DevicePart, GroupPlace, stage_holder
from shared.sizing import need_of


def start_instance(
    tx: Transaction, model: Model, placement: Placement, trigger: str, since: float, caused_by: str | None = None
) -> None:
    """Promise the chosen device's memory to an instance, stop its victims, and start it.

    Without victims the start is sent at once; otherwise it is a claim. A group on several nodes is
    one claim of the memory of all its stages.

    Args:
        tx: The decision's transaction.
        model: The model.
        placement: Where, and the victims.
        trigger: What asked.
        since: Time of the demand.
        caused_by: The plan whose migration makes the start necessary.
    """
    chosen = placement.chosen
    if chosen is None:
        return
    number = tx.next_token()
    waiting = tx.state.last_plan_of(model.key)
    reuse = waiting is not None and waiting.outcome == "pending" and waiting.way == "wait"
    plan_id = waiting.plan_id if waiting and reuse else f"plan-{number:x}"
    if placement.resume is None:
        instance = _new_instance(tx, model, chosen, plan_id, number, trigger, since)
    else:
        instance = _claim_suspended(tx, placement.resume, chosen.device_ids, plan_id, number, trigger, since)
    plan = create_unchecked(
        PlanRecord,
        {
            "plan_id": plan_id,
            "model": model.key,
            "created": waiting.created if waiting and reuse else tx.now,
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
            "preempted": None,
            "caused_by": caused_by or find_cause(tx, model, trigger, since),
        },
    )
    tx.put(plan)
    tx.plans.append(plan)
    use_promise(tx, instance)
    tx.put(instance)
    for index, device in enumerate(chosen.later_devices, start=1):
        tx.put(_later_stage(tx, instance, device, index, len(chosen.later_devices) + 1))
    promise_full_workers(tx, instance, chosen)
    demand = tx.state.demand.get(model.key)
    tx.emit(LoadStarted(plan_id, instance.instance_id, model.key, chosen.node, since, demand.traceparents if demand else ()))
    if chosen.template is not None and (template := tx.state.instances.get(chosen.template)) is not None:
        # Its node ends it when it receives the start; until then nothing else may use it.
        reason = f"its engine is taken by {model.key}"
        tx.put(replace(template, leaving="drain", leave_reason=reason, stop_at=tx.now))
    if placement.victims:
        _stop_victims(tx, [tx.state.instances[v] for v in placement.victims], placement.shortfalls, plan)
    for victim, device in placement.migrations:
        node, _, device_id = device.partition("/")
        source = tx.state.instances[victim]
        key = f"m-{tx.next_token():x}"
        tx.put(Migration(key, source.model, victim, tx.now, "placement", node=node, device=device_id, plan_id=plan_id))
    if model.sleep_requested and trigger != "park":
        tx.put(replace(model, sleep_requested=False))


def _new_instance(
    tx: Transaction, model: Model, chosen: Candidate, plan_id: str, number: int, trigger: str, since: float
) -> Instance:
    stages = len(chosen.later_devices) + 1  # of which the instance is the first one, if there are more
    card = model.card.in_stages(stages) if stages > 1 else model.card
    return Instance(
        instance_id=subjects.instance_id(number, chosen.node),
        plan_id=plan_id,
        model=model.key,
        generation=model.card.generation,
        revision=model.card.info.revision,
        node=chosen.node,
        device_ids=chosen.device_ids,
        token=number,
        reserve_bytes=-(-start_bytes(tx.state, card, chosen.device_ids[0].partition(":")[0]) // stages),
        kv_bytes=need_of(card).kv // stages,
        requested_at=since,
        planned_at=tx.now,
        trigger=trigger,
        stages=stages,
    )


def _later_stage(tx: Transaction, first: Instance, device: str, index: int, count: int) -> LaterStage:
    node, _, device_id = device.partition("/")
    return LaterStage(
        stage_id=subjects.instance_id(tx.next_token(), node),
        first=first.instance_id,
        model=first.model,
        node=node,
        device_id=device_id,
        index=index,
        count=count,
        reserve_bytes=first.reserve_bytes,
        kv_bytes=first.kv_bytes,
    )


def _claim_suspended(
    tx: Transaction, instance_id: str, device_ids: tuple[str, ...], plan_id: str, number: int, trigger: str, since: float
) -> Instance:
    parked = tx.state.instances[instance_id]
    return replace(
        parked,
        device_ids=device_ids,
        state=InstanceState.RESUMING,
        reserve_bytes=resume_need_bytes(tx.state, parked),
        plan_id=plan_id,
        token=number,
        requested_at=since,
        planned_at=tx.now,
        trigger=trigger,
        sent_at=None,
        ready_at=None,
    )


def _stop_victims(tx: Transaction, victims: list[Instance], shortfalls: Shortfalls, plan: PlanRecord) -> None:
    """Stop `victims`: suspend those that resume sooner than they restart, if that frees enough on
    each device.
    """
    suspended = {v.instance_id: True for v in victims}
    for device, short in shortfalls:
        there = [v for v in victims if device in tx.state.devices_of(v)]
        for victim_id, suspends in choose_suspensions(tx, there, short, resumes_faster).items():
            suspended[victim_id] &= suspends
    for victim in victims:
        # An instance that has just refused as busy serves, whatever its last report: with
        # `if_idle` it would refuse again.
        idle = tx.idle_since(victim.instance_id) is not None and not tx.is_cooling_down(victim.instance_id)
        how: Leaving = "if_idle" if idle else "drain"
        if not idle:
            mark_preempted(tx, victim, plan.plan_id)
        order = prefer_suspend(tx, victim, how) if suspended[victim.instance_id] else how
        stop_instance(tx, victim, order, f"makes room for {plan.model}")


def send_start(tx: Transaction, instance: Instance) -> None:
    """Send a start: to the nodeagent, and to the loader to fetch weights at the same time.

    If several devices are granted, the nodeagent does the latter. A resumption needs no weights.
    While other instances stop on its devices, the start may wait there.
    """
    model = tx.state.models[instance.model]
    sent = replace(instance, sent_at=tx.now, token=tx.next_token())
    tx.put(sent)
    mark_queued(tx, sent.instance_id)
    record_cleared(tx, sent)
    beside = (i for device in sent.device_ids for i in tx.state.on_device(sent.node, device))
    wait_ms = int(tx.policy.grant_wait_s * 1e3) if any(i.leaving != "no" for i in beside) else 0
    if sent.state is InstanceState.RESUMING:
        report = tx.state.reports.get(sent.instance_id)
        moves = report is not None and report.status.device_ids != sent.device_ids
        resume = ResumeInstance(
            device_ids=sent.device_ids if moves else (),
            token=sent.token,
            plan_id=sent.plan_id,
            instance_id=sent.instance_id,
            traceparent=sent.traceparent,
            priority=model.card.spec.priority,
            wait_ms=wait_ms,
        )
        tx.emit(SendResume(sent.node, resume, sent.requested_at, sent.planned_at, tx.now > sent.planned_at))
        return
    if later := tx.state.stages_behind(sent.instance_id):
        _send_group(tx, model, sent, later)
        return
    record_fetch(tx, sent, sent.node, sent.instance_id, model.card)
    plan = tx.state.plans.get(sent.plan_id)
    grant = granted_devices(tx, model, sent, plan)
    if wait_ms and not grant and is_loaded_by_node(model, sent):
        grant = sent.device_ids
    if not model.card.spec.loads_itself and not grant:  # else the node does so, for the device that it chooses
        tx.emit(SendPrepare(sent.node, _prepare_devices(sent, model.card)))
    command = StartInstance(
        template=plan.chosen.template if plan is not None and plan.chosen is not None else None,
        token=sent.token,
        plan_id=sent.plan_id,
        instance_id=sent.instance_id,
        card=model.card,
        device_ids=sent.device_ids,
        reserve_bytes=sent.reserve_bytes,
        kv_bytes=sent.kv_bytes,
        grant=grant,
        executor_bytes=need_of(model.card).executor,
        traceparent=sent.traceparent,
        priority=model.card.spec.priority,
        wait_ms=wait_ms,
    )
    tx.emit(SendStart(sent.node, command, sent.requested_at, sent.planned_at, tx.now > sent.planned_at))


def is_loaded_by_node(model: Model, i: Instance) -> bool:
    """True if the nodeagent can have the loader load a start's weights once it grants its memory.

    It does so for a start in an executor with a grant of devices, which may be its own.
    """
    return model.card.spec.may_share and i.stages == 1 and len(i.device_ids) == 1 and i.state is InstanceState.PREPARING


def _prepare_devices(i: Instance, card: ModelCard) -> PrepareWeights:
    """Return the order to load an instance's weights to all of its devices at the same time."""
    maps_units = card.spec.engine == "builtin"  # other engines take the weights from host memory
    if card.info.ranks > 1:  # its files have no whole weights for the ranks to share
        ranks = enumerate(card.ranks)
        parts = tuple(DevicePart(holder=stage_holder(i.instance_id, index), rank=rank) for index, rank in ranks)
    else:
        devices = i.device_ids if maps_units else (None,) * len(i.device_ids)
        stages = enumerate(card.pipeline or (None,))
        parts = tuple(
            DevicePart(holder=stage_holder(i.instance_id, index), device=devices[index], layers=layers) for index, layers in stages
        )
    return PrepareWeights(
        token=i.token,
        instance_id=i.instance_id,
        card=card,
        traceparent=i.traceparent,
        device=parts[0].device,
        layers=parts[0].layers,
        rank=parts[0].rank,
        parts=parts if len(parts) > 1 else (),
        background=i.trigger == CONSOLIDATION,
    )


def _send_group(tx: Transaction, model: Model, first: Instance, later: list[LaterStage]) -> None:
    """Send the starts of all stages of a group on several nodes, each to its node and loader."""
    group, card = first.instance_id, model.card.in_stages(len(later) + 1)
    places = [(group, first.node, first.device_ids[0], first.token)]
    for stage in later:
        tx.put(replace(stage, sent_at=tx.now))
        mark_queued(tx, stage.stage_id)
        places.append((stage.stage_id, stage.node, stage.device_id, tx.next_token()))
    for index, (instance_id, node, device_id, token) in enumerate(places):
        layers, prepare = card.stages[index], PrepareWeights(token=token, instance_id=instance_id, card=card)
        if card.pipeline:
            prepare = prepare.model_copy(update={"device": device_id, "layers": layers})
        elif card.ranks:
            prepare = prepare.model_copy(update={"rank": card.ranks[index]})
        _prepare_stage(tx, first, prepare, node)
        command = StartInstance(
            token=token,
            plan_id=first.plan_id,
            instance_id=instance_id,
            card=card,
            device_ids=(device_id,),
            reserve_bytes=first.reserve_bytes,
            kv_bytes=first.kv_bytes,
            traceparent=first.traceparent,
            priority=model.card.spec.priority,
        )
        place = GroupPlace(first=group, index=index, count=len(places))
        tx.emit(SendStart(node, command, first.requested_at, first.planned_at, tx.now > first.planned_at, place, layers))


def _prepare_stage(tx: Transaction, first: Instance, prepare: PrepareWeights, node: str) -> None:
    """Have a node's loader prepare the part of a stage, or of a rank of vLLM."""
    if prepare.card.spec.loads_itself:
        return
    record_fetch(tx, first, node, prepare.instance_id, prepare.card, prepare.layers, prepare.rank)
    tx.emit(SendPrepare(node, prepare.model_copy(update={"traceparent": first.traceparent})))


def stop_instance(tx: Transaction, i: Instance, how: Leaving, reason: str) -> None:
    """Ask an instance to stop: if idle, or after its requests.

    A claim is cancelled; a claim of a suspended instance stays suspended.
    """
    if i.is_resume_claim:
        cancel_resume(tx, i, reason)
        return
    if i.is_claim:
        remove_instance(tx, i, "cancelled", reason)
        return
    if i.leaving == how or i.leaving == "drain" or (i.leaving == "suspend" and how != "drain"):
        return
    asked = replace(i, leaving=how, leave_reason=reason, stop_at=tx.now)
    tx.put(asked)
    send_stop(tx, asked)


def send_stop(tx: Transaction, i: Instance) -> None:
    """Send `StopInstance`, or `SuspendInstance`."""
    tx.put(replace(i, stop_at=tx.now))
    if i.leaving in ("suspend", "suspend_if_idle"):
        suspend = SuspendInstance(
            token=tx.next_token(),
            instance_id=i.instance_id,
            only_if_idle=i.leaving == "suspend_if_idle",
            drain_timeout_ms=int(tx.policy.drain_timeout_s * 1e3),
            reason=i.leave_reason,
        )
        tx.emit(SendSuspend(i.node, suspend))
        return
    command = StopInstance(
        token=tx.next_token(),
        instance_id=i.instance_id,
        only_if_idle=i.leaving == "if_idle",
        drain_timeout_ms=int(tx.policy.drain_timeout_s * 1e3),
        reason=i.leave_reason,
    )
    tx.emit(SendStop(i.node, command))


def bind_start(tx: Transaction, i: Instance, status: InstanceStatus) -> Instance:
    """Move the booking of a start, and its plan, to the device that its node has bound it to."""
    bound = replace(i, device_ids=status.device_ids)
    tx.put(bound)
    plan = tx.state.plans.get(i.plan_id)
    if plan is None or plan.chosen is None or plan.outcome != "pending":
        return bound
    there = (c for c in plan.candidates if (c.node, c.device_ids) == (i.node, status.device_ids) and not (c.excluded or c.victims))
    chosen = next(there, plan.chosen.model_copy(update={"device_ids": status.device_ids}))
    reason = f"{plan.reason}; its node bound it to {', '.join(status.device_ids)} ({status.bound_by})"
    tx.put(plan.model_copy(update={"chosen": chosen, "reason": reason}))
    return bound


def mark_ready(tx: Transaction, i: Instance, status: InstanceStatus) -> None:
    """Complete a start: update its plan, the estimates, and the failure history."""
    tx.put(replace(i, state=InstanceState.READY, ready_at=tx.now, sent_at=i.sent_at or tx.now))
    plan = tx.state.plans.get(i.plan_id)
    measured = on_plan_clock(status.phases, tx.now - i.requested_at)
    if plan is not None and plan.outcome == "pending":
        chosen = plan.chosen
        if chosen is not None:
            times = {"took_ms": (tx.now - i.planned_at) * 1e3, "cleared_ms": cleared_ms(i, chosen, measured)}
            chosen = chosen.model_copy(update=times)
        done = {"outcome": "ready", "chosen": chosen, "measured": measured, "measured_ms": (tx.now - i.requested_at) * 1e3}
        ended = plan.model_copy(update=done)
        if chosen is None or not chosen.later_devices:
            if _is_of_present_generation(tx, i):
                _learn(tx, updated_estimates(tx.state, ended))
        else:  # its phases are those of the first stage
            learn_stage(tx, i.instance_id, 0, status)
        finish_plan(tx, i, ended)
    if model := tx.state.models.get(i.model):
        tx.put(replace(model, error=None))
    if failure_history := tx.state.failures.get(i.model):
        tx.put(replace(failure_history, attempts=0, kills=0, failed_devices=()))


def learn_stage(tx: Transaction, first: str, index: int, status: InstanceStatus) -> None:
    """Learn from a loaded stage of a group on several nodes, if its plan is known."""
    i = tx.state.instances.get(first)
    plan = tx.state.plans.get(i.plan_id) if i is not None else None
    if i is None or not _is_of_present_generation(tx, i):
        return
    if plan is not None and plan.chosen is not None and plan.instance_id == first:
        _learn(tx, stage_estimates(tx.state, plan, index, status.phases))


def _is_of_present_generation(tx: Transaction, i: Instance) -> bool:
    """True if the model has not changed since, so that the start has loaded its present bytes."""
    model = tx.state.models.get(i.model)
    return model is not None and i.generation == model.card.generation


def _learn(tx: Transaction, found: list[Estimate]) -> None:
    for estimate in found:
        known = tx.state.measured_on.get(estimate.model, ())
        if estimate.node != ANYWHERE and estimate.key not in tx.state.estimates and len(known) >= NODES_KEPT:
            tx.drop(Estimate, estimate_key(estimate.model, known[0]))
        tx.put(estimate)


def on_plan_clock(spans: tuple[PhaseSpan, ...], age: float) -> tuple[PhaseSpan, ...]:
    """Convert spans relative to now into milliseconds since the demand, `age` seconds ago."""
    return tuple(s.model_copy(update={"start_ms": s.start_ms + age * 1e3}) for s in spans)


def remove_instance(tx: Transaction, i: Instance, outcome: str, reason: str = "", error: ErrorBody | None = None) -> None:
    """Remove an instance; a plan that is still pending gets `outcome`.

    Stages of a group that were not sent yet give up their promised memory with it.
    """
    for stage in tx.state.stages_behind(i.instance_id):
        if stage.sent_at is None:
            tx.drop(LaterStage, stage.stage_id)
    tx.drop(Instance, i.instance_id)
    tx.drop(Cooldown, i.instance_id)
    tx.drop(Delivery, i.instance_id)
    report = tx.state.reports.get(i.instance_id)
    tx.drop(InstanceReport, i.instance_id)
    plan = tx.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        update: dict[str, object] = {"outcome": outcome, "error": error}
        if report:
            update["measured"] = on_plan_clock(report.status.phases, tx.now - i.requested_at)
        if reason:
            update["reason"] = f"{plan.reason}; {outcome}: {reason}"
        finish_plan(tx, i, plan.model_copy(update=update))
    _count_stopped(tx, i, (report.status.freed_bytes if report else None) or 0)


def finish_plan(tx: Transaction, i: Instance, plan: PlanRecord) -> None:
    tx.put(plan)
    tx.emit(LoadEnded(plan, i.node, i.requested_at, tx.now))


def _count_stopped(tx: Transaction, i: Instance, freed: int) -> None:
    for w in list(tx.state.waiters.values()):
        if w.kind == "sleep" and i.instance_id in w.instances and i.instance_id not in w.stopped:
            tx.put(replace(w, stopped=(*w.stopped, i.instance_id), freed_bytes=w.freed_bytes + freed))


def release_weights(tx: Transaction, i: Instance) -> None:
    tx.emit(SendRelease(i.node, ReleaseWeights(instance_id=i.instance_id)))


def mark_suspended(tx: Transaction, i: Instance, status: InstanceStatus) -> None:
    """Record a proved suspension."""
    set_suspended(tx, i, status.state)
    plan = tx.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        # started to be parked, or suspended before the report that it was ready
        finish_plan(
            tx, i, plan.model_copy(update={"outcome": "ready", "measured": on_plan_clock(status.phases, tx.now - i.requested_at)})
        )
    _count_stopped(tx, i, status.suspension.freed_bytes)


def cancel_resume(tx: Transaction, i: Instance, reason: str) -> None:
    """Keep a suspended instance suspended: nothing needs it any more, or there is no room."""
    report = tx.state.reports.get(i.instance_id)
    state = report.status.state if report is not None and report.status.state.parked else InstanceState.SUSPENDED
    plan = tx.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending" and plan.instance_id == i.instance_id:
        finish_plan(tx, i, plan.model_copy(update={"outcome": "cancelled", "reason": f"{plan.reason}; cancelled: {reason}"}))
    device_ids = report.status.device_ids if report is not None else i.device_ids
    set_suspended(tx, replace(i, device_ids=device_ids, ready_at=i.ready_at or i.planned_at), state)


def reply_awake(tx: Transaction, w: Waiter, ready: Instance) -> None:
    tx.drop(Waiter, w.waiter)
    awake = ModelAwake(instance_id=ready.instance_id, plan_id=ready.plan_id, took_ms=(tx.now - w.since) * 1e3)
    tx.emit(ReplyTo(w.waiter, awake))
