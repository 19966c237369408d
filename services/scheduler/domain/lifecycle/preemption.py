"""Record what a start takes from others: time to clear memory, and restarts that it causes.

The ledger charges both to the requests that waited for the start (docs/adr/0091). A start of a
preempted model is a restart if the model would still be ready without the preemption:

1. The victim served when it was preempted, and was the model's only instance.
2. Requests ask for the start (no operator, and not `replicas.min`), and no instance is left.
3. The first of them arrived within the model's keep-alive, and within five minutes.
4. No start of the model has succeeded in between.
"""

from __future__ import annotations

from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase, PhaseSpan, measure_covered
from shared.contracts.plans import Candidate, Preemption

_ASKED = ("demand", "retry")
"""Triggers of starts that requests ask for."""
_LONGEST_S = 300.0
"""Later something else may have evicted the instance, whatever its keep-alive."""


def mark_preempted(tx: Transaction, victim: Instance, plan_id: str) -> None:
    """Record in a victim's plan that `plan_id` preempts it, if that may cause a restart."""
    model, plan = tx.state.models.get(victim.model), tx.state.last_plan_of(victim.model)
    if model is None or plan is None or plan.instance_id != victim.instance_id or victim.state is not InstanceState.READY:
        return
    if [i.instance_id for i in tx.state.live_instances(model)] == [victim.instance_id]:  # 1
        tx.put(plan.model_copy(update={"preempted": Preemption(plan_id=plan_id, at=tx.now)}))


def find_cause(tx: Transaction, model: Model, trigger: str, since: float) -> str | None:
    """Return the plan whose preemption makes a start of `model` necessary; None: there is none.

    Args:
        tx: The decision's transaction.
        model: The model that starts.
        trigger: That of the start.
        since: Time of the demand.
    """
    last = tx.state.last_plan_of(model.key)
    if last is None or trigger not in _ASKED or tx.state.live_instances(model):  # 2
        return None
    if last.outcome == "pending":  # the record of the wait for this start
        return last.caused_by
    kept = model.card.spec.keep_alive
    longest = _LONGEST_S if kept < 0 else min(kept, _LONGEST_S)
    if last.outcome == "ready":  # 4
        taken = last.preempted
        return taken.plan_id if taken is not None and since - taken.at <= longest else None  # 3
    return last.caused_by if since - last.created <= longest else None  # the attempt before this one failed


def record_cleared(tx: Transaction, i: Instance) -> None:
    """Record that the memory which a claim's victims held is free."""
    plan = tx.state.plans.get(i.plan_id)
    if plan is not None and plan.chosen is not None and plan.chosen.victims:
        chosen = plan.chosen.model_copy(update={"cleared_ms": (tx.now - i.planned_at) * 1e3})
        tx.put(plan.model_copy(update={"chosen": chosen}))


def cleared_ms(i: Instance, chosen: Candidate, measured: tuple[PhaseSpan, ...]) -> float | None:
    """Return the milliseconds of clearing of a start that is ready.

    Args:
        i: The instance.
        chosen: As recorded when the start was sent.
        measured: Its phases since the demand: a start that was sent early waited on its node.
    """
    if chosen.cleared_ms is None or i.sent_at is None:
        return chosen.cleared_ms
    sent_ms = (i.sent_at - i.requested_at) * 1e3
    waits = [(max(s.start_ms, sent_ms), s.end_ms) for s in measured if s.phase is Phase.RESERVE and s.end_ms > sent_ms]
    return chosen.cleared_ms + measure_covered(waits)
