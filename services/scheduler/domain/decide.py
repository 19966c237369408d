"""The pure function from (state, event, now) to changes and effects."""

from __future__ import annotations

from dataclasses import field

from services.scheduler.domain.admin.commands import execute
from services.scheduler.domain.demand.key_shares import charge_use
from services.scheduler.domain.demand.reports import apply_demand, expire_demand, reply_to_demand
from services.scheduler.domain.demand.slo import adapt_alpha, apply_objectives
from services.scheduler.domain.effects import Effect, StepDown
from services.scheduler.domain.events import (
    AddModelsRequested,
    ChangeNodeRequested,
    CommandAccepted,
    DemandBatch,
    DemandReceived,
    Event,
    LoaderStatusReceived,
    MigrationRequested,
    MigrationUpdated,
    NodeStatusReceived,
    ObjectivesReported,
    PullCancelRequested,
    PullRequested,
    Recovered,
    RemoveModelRequested,
    SleepRequested,
    StartRefused,
    StopRefused,
    Tick,
    WaiterCancelled,
    WakeRequested,
)
from services.scheduler.domain.lifecycle.deliveries import mark_answered
from services.scheduler.domain.lifecycle.failures import on_resume_refused, on_start_failed, on_start_refused
from services.scheduler.domain.lifecycle.fetches import apply_fetch_status, end_fetches
from services.scheduler.domain.lifecycle.full_workers import restore_full_workers, settle_full_workers
from services.scheduler.domain.lifecycle.groups import on_stage_refused, settle_groups
from services.scheduler.domain.lifecycle.node_status import apply_node_status, expire_silent_nodes, stop_stalled_starts
from services.scheduler.domain.lifecycle.transitions import release_weights
from services.scheduler.domain.migration.consolidation import consolidate
from services.scheduler.domain.migration.orders import (
    apply_migration_record,
    cancel_unattended,
    cancel_waiter,
    drain_node,
    request_migration,
)
from services.scheduler.domain.migration.rebalance import rebalance
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.expectations import send_expectations
from services.scheduler.domain.prewarm.pulls import cancel_pulls, end_lost_pulls, request_pull
from services.scheduler.domain.reconcile import cancel_unfillable, reconcile
from services.scheduler.domain.state.changes import Change
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown, LoaderPresence, Presence, Waiter
from services.scheduler.domain.values import replace, value
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord
from shared.errors import InstanceBusy, InsufficientMemory, StaleToken

EPOCHS_SKIPPED = 63
"""Epochs that the next term skips after a refusal for a stale token.

A nodeagent remembers tokens of a database that was lost, and does not report which.
"""


@value(frozen=True, slots=True)
class Decision:
    """The result of a decision.

    Attributes:
        changes: Persisted and applied, in order.
        effects: Carried out after the changes are committed.
        plans: Records of the starts that the decision makes.
        overlay: The state with the changes applied. `state.absorb` merges it at less cost than
            applying the changes again.
    """

    changes: tuple[Change, ...]
    effects: tuple[Effect, ...]
    plans: tuple[PlanRecord, ...]
    overlay: ClusterState = field(compare=False, repr=False)


def decide(state: ClusterState, event: Event, now: float, policy: Policy) -> Decision:
    """Decide what follows from `event`.

    Args:
        state: The cluster's state, which the function does not change: the caller applies the
            changes.
        event: The event.
        now: Seconds on the loop's clock.
        policy: The scheduler's settings.

    Returns:
        The changes and effects.
    """
    tx = Transaction(state, now, policy)
    match event:
        case Recovered():
            for node in tx.state.nodes.values():
                tx.put(Presence(node.name, now))
            restore_full_workers(tx)
        case Tick(at=due):
            if is_silence_proved := event.proves_silence(policy.node_lost_after_s):
                expire_demand(tx, due)
            charge_use(tx)
            if is_silence_proved:
                expire_silent_nodes(tx, due)
                end_lost_pulls(tx, due)
                stop_stalled_starts(tx)
            cancel_unattended(tx, event.connected_since)
            adapt_alpha(tx)
            for pause in list(tx.state.cooldowns.values()):
                if pause.until <= now:
                    tx.drop(Cooldown, pause.subject)
            for node in tx.state.nodes.values():
                if node.drain_since is not None:
                    drain_node(tx, node.name)
            rebalance(tx)
            consolidate(tx)
            send_expectations(tx)
        case DemandReceived():
            apply_demand(tx, event)
        case DemandBatch(demands=demands):
            for each in demands:
                apply_demand(tx, each)
        case ObjectivesReported():
            apply_objectives(tx, event)
        case NodeStatusReceived(status=status, changed=changed):
            apply_node_status(tx, status, changed)
        case LoaderStatusReceived(status=loader):
            tx.put(LoaderPresence(loader.node, now, loader))
            apply_fetch_status(tx, loader)
        case StartRefused(instance_id=instance_id, error=error):
            mark_answered(tx, instance_id)
            _start_refused(tx, instance_id, error)
        case StopRefused(instance_id=instance_id, error=error):
            _stop_refused(tx, instance_id, error)
        case CommandAccepted(instance_id=instance_id):
            mark_answered(tx, instance_id)
        case WaiterCancelled(waiter=waiter):
            tx.drop(Waiter, waiter)
            cancel_waiter(tx, waiter)
        case MigrationRequested():
            request_migration(tx, event)
        case MigrationUpdated(record=record):
            apply_migration_record(tx, record)
        case PullRequested():
            request_pull(tx, event)
        case PullCancelRequested():
            cancel_pulls(tx, event)
        case AddModelsRequested() | RemoveModelRequested() | WakeRequested() | SleepRequested() | ChangeNodeRequested():
            execute(tx, event)
    recovering = now - state.recovered_at <= policy.recovery_window_s
    reconcile(tx, everything=recovering or isinstance(event, Recovered | Tick), only_due=not recovering and isinstance(event, Tick))
    settle_groups(tx)
    settle_full_workers(tx)
    end_fetches(tx)
    for each in (event,) if isinstance(event, DemandReceived) else event.demands if isinstance(event, DemandBatch) else ():
        reply_to_demand(tx, each)
    return Decision(tx.net_changes(), tuple(tx.effects), tuple(tx.plans), tx.state)


def _start_refused(tx: Transaction, instance_id: str, error: ErrorBody) -> None:
    instance = tx.state.instances.get(instance_id)
    stage = tx.state.later_stages.get(instance_id)
    if instance is None and stage is None:
        return
    if error.code == StaleToken.code:
        tx.emit(StepDown(tx.state.epoch + EPOCHS_SKIPPED))
    elif stage is not None:
        on_stage_refused(tx, stage, error)
    elif instance is None:
        return
    elif instance.state is InstanceState.RESUMING:
        on_resume_refused(tx, instance, error)
    elif error.code == InsufficientMemory.code:
        on_start_refused(tx, instance)
    elif instance_id not in tx.state.reports:
        release_weights(tx, instance)
        on_start_failed(tx, instance, error)


def _stop_refused(tx: Transaction, instance_id: str, error: ErrorBody) -> None:
    """Keep a busy instance; for any other refusal the stop is repeated until it takes effect."""
    instance = tx.state.instances.get(instance_id)
    if error.code == StaleToken.code:
        tx.emit(StepDown(tx.state.epoch + EPOCHS_SKIPPED))
    elif instance is not None and error.code == InstanceBusy.code and instance.leaving in ("if_idle", "suspend_if_idle"):
        tx.put(replace(instance, leaving="no", leave_reason="", stop_at=None))
        tx.put(Cooldown(instance_id, tx.now + tx.policy.busy_cooldown_s))
        for device in instance.device_ids:
            cancel_unfillable(tx, instance.node, device)
