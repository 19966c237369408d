"""Start the instances that models want, or record why none starts."""

from __future__ import annotations

from services.scheduler.domain.demand.replica_targets import Wish
from services.scheduler.domain.lifecycle.failures import give_up
from services.scheduler.domain.lifecycle.transitions import begin
from services.scheduler.domain.placement.place import Placement, place
from services.scheduler.domain.state.entities import Model
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import Unmet
from services.scheduler.domain.values import replace
from shared.contracts.plans import PlanRecord


def grant(d: Draft, wish: Wish) -> bool:
    """Start what is wished for, or keep on record why not. Whether something was begun (then there may be more to wish for)."""
    model = d.state.models[wish.model.key]
    placement = _placed(d, model, wish)
    if placement.chosen is not None:
        begin(d, model, placement, wish.trigger, wish.heard)
        d.drop(Unmet, model.key)
        return True
    if wish.extra:
        return False
    if placement.error is not None and wish.trigger != "min_replicas":
        plan = _note(d, wish, placement)
        failed = plan.model_copy(update={"outcome": "failed", "error": placement.error.body()})
        d.put(failed)
        give_up(d, model, placement.error.body(), plan.plan_id)
    else:
        d.put(Unmet(model.key, wish.heard, placement.reason))
        _note(d, wish, placement)
        if placement.error is not None and model.error != placement.error.message:
            d.put(replace(model, error=placement.error.message))
    return False


def _placed(d: Draft, model: Model, wish: Wish) -> Placement:
    """Another instance goes to a node that runs none of the model, if one has room: a hot model outlives its nodes, and shares their links."""
    waited, kept = wish.waited_s(d.now), wish.trigger == "min_replicas"
    if d.state.live(model):
        alone = place(d, model, waited, extra=wish.extra, kept_up_only=kept, apart=True)
        if alone.chosen is not None:
            return alone
    return place(d, model, waited, extra=wish.extra, kept_up_only=kept)


def _note(d: Draft, wish: Wish, placement: Placement) -> PlanRecord:
    """Keep the record of a decision that starts nothing: one for as long as the model waits, rewritten when the reason changes."""
    last = d.state.last_plan_of(wish.model.key)
    waiting = last if last is not None and last.outcome == "pending" and last.instance_id is None else None
    record = PlanRecord(
        plan_id=waiting.plan_id if waiting else f"plan-{d.token():x}",
        model=wish.model.key,
        created=waiting.created if waiting else d.now,
        trigger=wish.trigger,
        way=placement.way,
        candidates=placement.candidates,
        reason=placement.reason,
    )
    d.put(record)
    return record
