"""What follows when a start or an instance fails: once more elsewhere, or everybody who waits is told why."""

from __future__ import annotations

from services.scheduler.domain.effects import PublishLoadFailed, ReplyTo
from services.scheduler.domain.lifecycle import park_attempts
from services.scheduler.domain.lifecycle.transitions import conclude, finish_plan, leave, release, stays_suspended
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import ModelDemand, Pause, Pressure, Trouble, Unmet, Waiter
from services.scheduler.domain.values import replace
from shared.contracts.base import ErrorBody
from shared.contracts.demand import LoadFailed
from shared.errors import EngineKilled, InsufficientMemory, InvalidModel, Unavailable, from_body

MAX_ATTEMPTS, MAX_KILLED = 2, 6
"""Starts tried before those who wait are told: a start that fails by itself is likely to fail again, one that was killed is not."""


def start_failed(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A start failed: once more if that can help, else everybody who waits is told."""
    conclude(d, i, "failed" if i.leaving == "no" else "cancelled", error.message, error)
    _count_failure(d, i, error)


def stalled(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A start gets on no longer: as `start_failed`, but it is stopped first, and its bytes stay booked until they are proved free."""
    plan = d.state.plans.get(i.plan_id)
    if plan is not None and plan.outcome == "pending":
        finish_plan(d, i, plan.model_copy(update={"outcome": "failed", "error": error}))
    leave(d, i, "drain", error.message)
    _count_failure(d, i, error)


def _count_failure(d: Draft, i: Instance, error: ErrorBody) -> None:
    model = d.state.models.get(i.model)
    if model is None or i.leaving != "no" or i.generation != model.card.generation:
        return
    trouble = d.state.trouble.get(i.model) or Trouble(i.model)
    here = tuple(f"{i.node}/{device}" for device in i.device_ids)
    cause = from_body(error)
    hopeless, killed = isinstance(cause, InvalidModel), isinstance(cause, EngineKilled)
    if i.trigger == park_attempts.TRIGGER:
        park_attempts.failed(d, i.model, error.message, hopeless=hopeless)
        d.put(replace(model, error=error.message))
        return
    if killed and trouble.killed + 1 < MAX_KILLED:
        d.put(replace(trouble, killed=trouble.killed + 1, error=error))
    elif not (hopeless or killed) and trouble.attempts + 1 < MAX_ATTEMPTS:
        d.put(replace(trouble, attempts=trouble.attempts + 1, avoid=trouble.avoid + here, error=error))
    else:
        give_up(d, model, error, i.plan_id)
        return
    d.put(replace(model, error=error.message))


def crashed(d: Draft, i: Instance, error: ErrorBody) -> None:
    """A ready instance failed: the next demand starts another, `replicas.min` backs off if it keeps happening."""
    conclude(d, i, "failed", error.message, error)
    model = d.state.models.get(i.model)
    if model is None:
        return
    d.put(replace(model, error=error.message))
    if i.trigger == park_attempts.TRIGGER:
        park_attempts.failed(d, i.model, error.message)
    trouble = d.state.trouble.get(i.model) or Trouble(i.model)
    quick = i.ready_at is not None and d.now - i.ready_at < d.policy.settled_after
    failures = trouble.failures + 1 if quick else 1
    d.put(replace(trouble, failures=failures, not_before=d.now + d.policy.backoff(failures), error=error))


def give_up(d: Draft, model: Model, error: ErrorBody, plan_id: str | None) -> None:
    """Nobody need wait any longer: the model cannot be made ready now. Its next request may try again."""
    trouble = d.state.trouble.get(model.key) or Trouble(model.key)
    failures = trouble.failures + 1
    d.put(Trouble(model.key, failures=failures, failed_at=d.now, not_before=d.now + d.policy.backoff(failures), error=error))
    if error.code != Unavailable.code:  # that there is no node is no failure of the model's, and over when one is there
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
    _shun(d, i)


def resume_refused(d: Draft, i: Instance, error: ErrorBody) -> None:
    """No room after all: promised anew once the node tells what it has. Not there any more: another one is started."""
    if error.code == InsufficientMemory.code:
        stays_suspended(d, i, error.message)
        _shun(d, i)
    else:
        conclude(d, i, "cancelled", error.message, error)


def _shun(d: Draft, i: Instance) -> None:
    for device in i.device_ids:
        d.put(Pause(f"{i.node}/{device}", d.now + d.policy.shun_pause))
