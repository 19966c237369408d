"""One pure function from (state, event, now) to what changes and what is sent."""

from __future__ import annotations

from dataclasses import field

from services.scheduler.domain.admin.commands import administer
from services.scheduler.domain.demand.reports import answer_demand, forget_old_demand, hear_demand
from services.scheduler.domain.demand.slo import adapt
from services.scheduler.domain.effects import Effect, StepDown
from services.scheduler.domain.events import (
    AddModelsAsked,
    ChangeNodeAsked,
    CommandAccepted,
    DemandHeard,
    DemandsHeard,
    Event,
    LoaderStatusHeard,
    MigrateAsked,
    MigrationHeard,
    NodeStatusHeard,
    Recovered,
    RemoveModelAsked,
    SleepAsked,
    StartRefused,
    StopRefused,
    Tick,
    WaiterGone,
    WakeAsked,
)
from services.scheduler.domain.lifecycle.failures import refused, resume_refused, start_failed
from services.scheduler.domain.lifecycle.node_status import end_stalled_starts, hear_node, lose_silent_nodes
from services.scheduler.domain.lifecycle.transitions import release
from services.scheduler.domain.migration.orders import ask, drain_node, forget_waiter, hear
from services.scheduler.domain.migration.rebalance import rebalance
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.reconcile import settle
from services.scheduler.domain.state.changes import Change
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Draft
from services.scheduler.domain.state.volatile import LoaderPresence, Pause, Presence, Waiter
from services.scheduler.domain.values import replace, value
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord
from shared.errors import InstanceBusy, InsufficientMemory, StaleToken

EPOCHS_SKIPPED = 63
"""After a refusal as stale the next term begins this far up: a node remembers tokens of a database that was lost, and does not say which."""


@value(frozen=True, slots=True)
class Decision:
    """`changes` are persisted and applied, in order; `effects` are carried out after that; `plans` are those that start something.

    `above` is the state with the changes applied, an overlay: `state.absorb` takes it over for less than applying them again."""

    changes: tuple[Change, ...]
    effects: tuple[Effect, ...]
    plans: tuple[PlanRecord, ...]
    above: ClusterState = field(compare=False, repr=False)


def decide(state: ClusterState, event: Event, now: float, policy: Policy) -> Decision:
    """What follows from `event`. `state` is not changed: `apply` the changes to it."""
    d = Draft(state, now, policy)
    match event:
        case Recovered():
            for node in d.state.nodes.values():
                d.put(Presence(node.name, now))
        case Tick():
            forget_old_demand(d)
            lose_silent_nodes(d)
            end_stalled_starts(d)
            adapt(d)
            for pause in list(d.state.pauses.values()):
                if pause.until <= now:
                    d.drop(Pause, pause.subject)
            for node in d.state.nodes.values():
                if node.drain_since is not None:
                    drain_node(d, node.name)
            rebalance(d)
        case DemandHeard():
            hear_demand(d, event)
        case DemandsHeard(heard=heard):
            for each in heard:
                hear_demand(d, each)
        case NodeStatusHeard(status=status):
            hear_node(d, status)
        case LoaderStatusHeard(status=loader):
            d.put(LoaderPresence(loader.node, now, loader))
        case StartRefused(instance_id=instance_id, error=error):
            _start_refused(d, instance_id, error)
        case StopRefused(instance_id=instance_id, error=error):
            _stop_refused(d, instance_id, error)
        case CommandAccepted():
            pass
        case WaiterGone(waiter=waiter):
            d.drop(Waiter, waiter)
            forget_waiter(d, waiter)
        case MigrateAsked():
            ask(d, event)
        case MigrationHeard(record=record):
            hear(d, record)
        case AddModelsAsked() | RemoveModelAsked() | WakeAsked() | SleepAsked() | ChangeNodeAsked():
            administer(d, event)
    recovering = now - state.recovered_at <= policy.recovery_window
    settle(d, everything=recovering or isinstance(event, Recovered | Tick), only_due=not recovering and isinstance(event, Tick))
    for each in (event,) if isinstance(event, DemandHeard) else event.heard if isinstance(event, DemandsHeard) else ():
        answer_demand(d, each)
    return Decision(d.net(), tuple(d.effects), tuple(d.plans), d.state)


def _start_refused(d: Draft, instance_id: str, error: ErrorBody) -> None:
    instance = d.state.instances.get(instance_id)
    if instance is None:
        return
    if error.code == StaleToken.code:
        d.emit(StepDown(d.state.epoch + EPOCHS_SKIPPED))
    elif instance.state is InstanceState.RESUMING:
        resume_refused(d, instance, error)
    elif error.code == InsufficientMemory.code:
        refused(d, instance)
    elif instance_id not in d.state.seen:
        release(d, instance)
        start_failed(d, instance, error)


def _stop_refused(d: Draft, instance_id: str, error: ErrorBody) -> None:
    """A busy instance stays. Any other refusal is left to the next status: the stop is repeated until it shows effect."""
    instance = d.state.instances.get(instance_id)
    if error.code == StaleToken.code:
        d.emit(StepDown(d.state.epoch + EPOCHS_SKIPPED))
    elif instance is not None and error.code == InstanceBusy.code and instance.leaving in ("if_idle", "suspend_if_idle"):
        d.put(replace(instance, leaving="no", leave_reason="", stop_at=None))
        d.put(Pause(instance_id, d.now + d.policy.busy_pause))
