"""Consolidation: a pipeline group becomes one instance while it serves (HydraServe §5). Pure.

A group that the scheduler chose (ADR 0079) is a way to start, not a way to serve: it has an engine
process and a hop for each stage. On each Tick:

1. Only a ready group that the scheduler chose is consolidated. `stages: N` stays as it is.
2. It has served for `consolidate_after_s`.
3. Load is low: no request waits for the model, and its sliding window predicts the need of one
   instance, or of no more than the model has groups (a burst starts several), each of which becomes
   one. Under more load the autoscaler starts several whole instances, on the devices of the stages
   first (replica_targets.py). The groups then serve until enough of them are ready.
4. No other model waits for memory, and an idle group does not end before its successor is ready.
5. A whole instance of the model is there, or a device has free memory for one (whole_worker.py).
6. After failures there is a back-off.

Then a migration is created whose source is the group. Its destination loads with low priority. When
it is ready, the requests migrate, and the group stops as a whole (orders.py). With several
destinations there is a migration for each, with its share of the requests. Until the end the group
serves: whatever fails, requests continue there, or from their tokens.
"""

from __future__ import annotations

from services.scheduler.domain.demand.replica_targets import measure_demand
from services.scheduler.domain.migration.orders import needs_successor, plan_migration
from services.scheduler.domain.placement.whole_worker import place_whole_worker
from services.scheduler.domain.policies.autoscaling import needed_workers
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import CONSOLIDATION, Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.node import InstanceState


def consolidate(tx: Transaction) -> None:
    """Create the migrations of the groups that are to be consolidated now."""
    for first in sorted(tx.state.stages_of):
        group = tx.state.instances.get(first)
        if group is None or not _may_be_consolidated(tx.state, group, tx.policy):  # 1
            continue
        model = tx.state.models[group.model]
        if due_at(tx.state, group, tx.policy) <= tx.now and _is_wanted(tx, model) and _has_place(tx, model, group):  # 2, 6
            plan_migration(tx, group, CONSOLIDATION)


def is_consolidation_due(state: ClusterState, now: float, policy: Policy, within_s: float) -> bool:
    """True if the time at which a group may be consolidated is near, or has just passed."""
    groups = (state.instances.get(first) for first in state.stages_of)
    return any(
        abs(due_at(state, group, policy) - now) <= within_s
        for group in groups
        if group is not None and _may_be_consolidated(state, group, policy)
    )


def _may_be_consolidated(state: ClusterState, group: Instance, policy: Policy) -> bool:
    """True for a group that only its start needed."""
    model = state.models.get(group.model)
    return (
        policy.consolidate
        and "pipeline" in policy.capabilities & policy.profile.uses
        and "migrate" in policy.capabilities
        and group.state is InstanceState.READY
        and group.leaving == "no"
        and model is not None
        and group.generation == model.card.generation
        and model.card.spec.stages == 1
    )


def due_at(state: ClusterState, group: Instance, policy: Policy) -> float:
    """Return the time from which a group may be consolidated."""
    known = state.consolidation_failures.get(group.model)
    return max((group.ready_at or 0.0) + policy.consolidate_after_s, known.not_before if known is not None else 0.0)


def _is_wanted(tx: Transaction, model: Model) -> bool:
    """True if the load fits whole instances that are ready, or one that may start (3, 4)."""
    live = tx.state.live_instances(model)
    ready = sum(1 for i in live if i.stages == 1 and i.state is InstanceState.READY)
    needed = needed_workers(measure_demand(tx, model, live))
    if ready and (needed <= ready or ready >= model.card.spec.replicas.max):
        return True
    groups = sum(1 for i in live if i.stages > 1 and i.state is InstanceState.READY)
    return needed <= max(1, groups) and not tx.state.waiting_count(model.key) and not tx.state.unschedulable


def _has_place(tx: Transaction, model: Model, group: Instance) -> bool:
    """True if a whole instance is there, or can start and is ready before the group ends (4, 5)."""
    if not needs_successor(tx, model, group):
        return True
    found = place_whole_worker(tx, model, group).chosen
    if found is None:
        return False
    kept, idle = tx.state.keep_alive_s(group, model), tx.idle_since(group.instance_id)
    if idle is None or kept < 0 or model.card.spec.pin:
        return True
    return tx.now + (found.predicted_ms or 0.0) / 1e3 < max(idle, group.ready_at or idle) + kept
