"""Start the instances that models need, or record why none starts."""

from __future__ import annotations

from services.scheduler.domain.demand.key_shares import charge_start
from services.scheduler.domain.demand.replica_targets import ScaleUp, burst_key
from services.scheduler.domain.lifecycle.failures import fail_demand
from services.scheduler.domain.lifecycle.full_workers import place_before_promises
from services.scheduler.domain.lifecycle.preemption import find_cause
from services.scheduler.domain.lifecycle.transitions import start_instance
from services.scheduler.domain.placement.burst import place_group_beside
from services.scheduler.domain.placement.place import Placement, place
from services.scheduler.domain.placement.whole_worker import place_whole_worker
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown, Unschedulable
from services.scheduler.domain.values import replace
from shared.contracts.plans import PlanRecord


def scale_up(tx: Transaction, needed: ScaleUp) -> bool:
    """Start the needed instance, or record the obstacle.

    Returns:
        True if something was started; the model may then need one more.
    """
    model = tx.state.models[needed.model.key]
    placement = _place_replica(tx, model, needed)
    if placement.chosen is not None:
        start_instance(tx, model, placement, needed.trigger, needed.first_message_at)
        _charge(tx, model)
        tx.drop(Unschedulable, model.key)
        return True
    if needed.is_burst:
        tx.put(Cooldown(burst_key(model.key), tx.now + tx.policy.refusal_cooldown_s))
    if needed.is_extra:
        return False
    if placement.error is not None and needed.trigger != "min_replicas":
        plan = _note(tx, needed, placement)
        failed = plan.model_copy(update={"outcome": "failed", "error": placement.error.body()})
        tx.put(failed)
        fail_demand(tx, model, placement.error.body(), plan.plan_id)
    else:
        tx.put(Unschedulable(model.key, needed.first_message_at, placement.reason))
        _note(tx, needed, placement)
        if placement.error is not None and model.error != placement.error.message:
            tx.put(replace(model, error=placement.error.message))
    return False


def _charge(tx: Transaction, model: Model) -> None:
    """Charge the keys whose requests wait for the start that was decided last."""
    plan = tx.state.last_plan_of(model.key)
    instance = tx.state.instances.get(plan.instance_id) if plan is not None and plan.instance_id is not None else None
    if plan is not None and plan.chosen is not None and instance is not None:
        charge_start(tx, instance, (plan.chosen.predicted_ms or 0.0) / 1e3)


def _place_replica(tx: Transaction, model: Model, needed: ScaleUp) -> Placement:
    """Place a replica on a node without the model, if possible: for availability and bandwidth.

    The replicas that replace a group take the devices of its stages first.
    """
    waited, kept = needed.waited_s(tx.now), needed.trigger == "min_replicas"
    if needed.is_burst:
        return place_group_beside(tx, model, waited)
    if live := tx.state.live_instances(model):
        groups = [i for i in live if i.stages > 1] if model.card.spec.stages == 1 and tx.policy.consolidate else []
        if groups and (whole := place_whole_worker(tx, model, *groups)).chosen is not None:
            return whole
        alone = place(tx, model, waited, extra=needed.is_extra, min_replicas_only=kept, spread=True)
        if alone.chosen is not None:
            return alone
    if needed.is_extra:
        return place(tx, model, waited, extra=True)
    return place_before_promises(tx, model.key, lambda view: place(view, model, waited, min_replicas_only=kept))


def _note(tx: Transaction, needed: ScaleUp, placement: Placement) -> PlanRecord:
    """Store the record of a decision that starts nothing: one per wait, updated with its reason."""
    last = tx.state.last_plan_of(needed.model.key)
    waiting = last if last is not None and last.outcome == "pending" and last.instance_id is None else None
    record = PlanRecord(
        plan_id=waiting.plan_id if waiting else f"plan-{tx.next_token():x}",
        model=needed.model.key,
        created=waiting.created if waiting else tx.now,
        trigger=needed.trigger,
        way=placement.way,
        candidates=placement.candidates,
        reason=placement.reason,
        caused_by=find_cause(tx, needed.model, needed.trigger, needed.first_message_at),
    )
    tx.put(record)
    return record
