"""React to a failed start or instance: retry elsewhere, or fail the requests."""

from __future__ import annotations

from services.scheduler.domain.effects import PublishLoadFailed, ReplyTo
from services.scheduler.domain.lifecycle import park_attempts
from services.scheduler.domain.lifecycle.transitions import (
    cancel_resume,
    finish_plan,
    release_weights,
    remove_instance,
    stop_instance,
)
from services.scheduler.domain.state.entities import CONSOLIDATION, Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import (
    ConsolidationFailures,
    Cooldown,
    FailureHistory,
    ModelDemand,
    Overload,
    Unschedulable,
    Waiter,
)
from services.scheduler.domain.values import replace
from shared.contracts.base import ErrorBody
from shared.contracts.demand import LoadFailed
from shared.errors import EngineKilled, InsufficientMemory, InvalidModel, RestoreFailed, Unavailable, from_body

MAX_ATTEMPTS, MAX_KILLED = 2, 6
"""Starts tried before the waiting requests fail.

A start that fails by itself is likely to fail again; one whose engine was killed is not.
"""


def on_start_failed(tx: Transaction, i: Instance, error: ErrorBody) -> None:
    """Retry a failed start if that can help; otherwise fail the waiting requests."""
    remove_instance(tx, i, "failed" if i.leaving == "no" else "cancelled", error.message, error)
    _count_failure(tx, i, error)


def on_start_stalled(tx: Transaction, i: Instance, error: ErrorBody, at: str | None = None) -> None:
    """Stop a start without progress, then proceed as after a failed start.

    Its memory stays booked until the node proves it free.

    Args:
        tx: The decision's transaction.
        i: The instance that starts.
        error: The reason.
        at: The device (node/device) of the stage that failed; None: any of the instance's may have.
    """
    plan = tx.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending":
        finish_plan(tx, i, plan.model_copy(update={"outcome": "failed", "error": error}))
    stop_instance(tx, i, "drain", error.message)
    _count_failure(tx, i, error, at)


def _count_failure(tx: Transaction, i: Instance, error: ErrorBody, at: str | None = None) -> None:
    model = tx.state.models.get(i.model)
    if model is None or i.leaving != "no" or i.generation != model.card.generation:
        return
    if i.trigger == CONSOLIDATION:  # the group serves on
        failed = tx.state.consolidation_failures.get(i.model) or ConsolidationFailures(i.model)
        here = tuple(f"{i.node}/{device}" for device in i.device_ids)
        tx.put(replace(failed, failed_devices=failed.failed_devices + here))
        return
    failure_history = tx.state.failures.get(i.model) or FailureHistory(i.model)
    plan = tx.state.plans.get(i.plan_id)
    later = plan.chosen.later_devices if plan is not None and plan.chosen is not None else ()
    here = (at,) if at is not None else (*(f"{i.node}/{device}" for device in i.device_ids), *later)
    cause = from_body(error)
    hopeless, killed = isinstance(cause, InvalidModel), isinstance(cause, EngineKilled)
    if i.trigger == park_attempts.TRIGGER:
        park_attempts.record_park_failure(tx, i.model, error.message, hopeless=hopeless)
        tx.put(replace(model, error=error.message))
        return
    if killed and failure_history.kills + 1 < MAX_KILLED:
        tx.put(replace(failure_history, kills=failure_history.kills + 1, error=error))
    elif not (hopeless or killed) and failure_history.attempts + 1 < MAX_ATTEMPTS:
        tx.put(
            replace(
                failure_history,
                attempts=failure_history.attempts + 1,
                failed_devices=failure_history.failed_devices + here,
                error=error,
            )
        )
    else:
        fail_demand(tx, model, error, i.plan_id)
        return
    tx.put(replace(model, error=error.message))


def on_crash(tx: Transaction, i: Instance, error: ErrorBody) -> None:
    """Remove a ready instance that failed; `replicas.min` backs off if that repeats.

    The next demand starts another instance.
    """
    remove_instance(tx, i, "failed", error.message, error)
    model = tx.state.models.get(i.model)
    if model is None:
        return
    tx.put(replace(model, error=error.message))
    if i.trigger == park_attempts.TRIGGER:
        park_attempts.record_park_failure(tx, i.model, error.message)
    failure_history = tx.state.failures.get(i.model) or FailureHistory(i.model)
    quick = i.ready_at is not None and tx.now - i.ready_at < tx.policy.stable_after_s
    failures = failure_history.failures + 1 if quick else 1
    tx.put(replace(failure_history, failures=failures, not_before=tx.now + tx.policy.backoff_s(failures), error=error))


def fail_demand(tx: Transaction, model: Model, error: ErrorBody, plan_id: str | None) -> None:
    """Fail the waiting requests: the model cannot be made ready now.

    Its next request may try again.
    """
    failure_history = tx.state.failures.get(model.key) or FailureHistory(model.key)
    failures = failure_history.failures + 1
    tx.put(
        FailureHistory(
            model.key, failures=failures, failed_at=tx.now, not_before=tx.now + tx.policy.backoff_s(failures), error=error
        )
    )
    if error.code != Unavailable.code:  # the absence of nodes is no failure of the model, and ends with the first node
        tx.put(replace(model, error=error.message))
    tx.emit(PublishLoadFailed(LoadFailed(model=model.key, plan_id=plan_id, error=error)))
    tx.drop(ModelDemand, model.key)
    tx.drop(Unschedulable, model.key)
    tx.drop(Overload, model.key)
    for w in list(tx.state.waiters.values()):
        if w.kind == "wake" and w.model == model.key:
            tx.drop(Waiter, w.waiter)
            tx.emit(ReplyTo(w.waiter, error))


def on_start_refused(tx: Transaction, i: Instance) -> None:
    """Release a start that its nodeagent had no memory for; the model is placed again."""
    remove_instance(tx, i, "cancelled", "the nodeagent refused the reservation")
    release_weights(tx, i)
    _cool_down_devices(tx, i)


def on_resume_refused(tx: Transaction, i: Instance, error: ErrorBody) -> None:
    """Cancel a refused resumption.

    1. No memory: its devices are not tried again for a while.
    2. It cannot be restored onto that device: the report of the node was old.
    3. The instance is gone: another one is started.
    """
    if error.code == InsufficientMemory.code:  # 1
        cancel_resume(tx, i, error.message)
        _cool_down_devices(tx, i)
    elif error.code == RestoreFailed.code:  # 2
        cancel_resume(tx, i, error.message)
        if (report := tx.state.reports.get(i.instance_id)) is not None:
            suspension = report.status.suspension.model_copy(update={"moves_to": ()})
            tx.put(replace(report, status=report.status.model_copy(update={"suspension": suspension})))
    else:  # 3
        remove_instance(tx, i, "cancelled", error.message, error)


def _cool_down_devices(tx: Transaction, i: Instance) -> None:
    for device in i.device_ids:
        tx.put(Cooldown(f"{i.node}/{device}", tx.now + tx.policy.refusal_cooldown_s))
