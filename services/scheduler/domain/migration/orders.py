"""Migrations of requests between instances. The steps of an order (`Migration`):

1. Requested: by an operator (`MigrationRequested`), for a drained node, for memory that another
   model needs, to rebalance, or to make one instance of a pipeline group (consolidation.py).
2. Destination: a ready instance with the same weights, else one that is starting, else a new one
   that is placed like any other.
3. Ordered: the record is written for the migrators (`OrderMigration`). A source that stops in any
   case drains at once, so that it gets no new requests.
4. Finished: the requester is answered, the times are learned, and an empty source is stopped.

A destination is protected until then (`ClusterState.inbound_migration`). Ordered migrations are in
the bucket, where a new leader reads them. Others end with their leader, and so do the starts of
their destinations beyond `replicas.max`; those of a drained node are requested again.
"""

from __future__ import annotations

from services.scheduler.domain.demand.replica_targets import measure_demand
from services.scheduler.domain.effects import CancelMigration, OrderMigration, ReplyTo
from services.scheduler.domain.estimates.migration_times import learn_migration_times, migration_times_between
from services.scheduler.domain.events import MigrationRequested
from services.scheduler.domain.lifecycle.transitions import start_instance, stop_instance
from services.scheduler.domain.placement.place import place
from services.scheduler.domain.placement.whole_worker import place_whole_worker
from services.scheduler.domain.policies.autoscaling import needed_workers, share_requests
from services.scheduler.domain.state.entities import CONSOLIDATION, MIGRATE, Instance, Model
from services.scheduler.domain.state.migrations import Migration
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import ConsolidationFailures, Cooldown
from services.scheduler.domain.values import replace
from shared.contracts.admin import MigrationsViewed
from shared.contracts.base import ErrorBody
from shared.contracts.migration import LEASE_S, MigrationRecord
from shared.contracts.node import InstanceState
from shared.errors import Conflict, InsufficientMemory, InvalidRequest, NotFound, ThawError, Unavailable, UnsupportedParameter

ALWAYS_STOPS_SOURCE = ("drain", "placement")
"""Reasons for which the source stops, whatever becomes of the migration."""
UNCLAIMED_S = 10.0
"""An order that no migrator has claimed by then, or works on, is cancelled."""
NO_MIGRATOR = "no migrator claims the order. Start one: python -m services.migrator"
OWNER_GONE = "its migrator has ended, and no other migrator continues it. Start one: python -m services.migrator"
SHARE_S = 1.0
"""After a share of a group's requests has moved, the next one waits for this long."""
RETRY_S = 5.0
"""A drained node's instance is not asked to migrate again before this."""


def request_migration(tx: Transaction, event: MigrationRequested) -> None:
    """Step 1, for an operator."""
    try:
        source = tx.state.instances.get(event.instance_id)
        if source is None:
            raise NotFound(f"No instance {event.instance_id!r}; see `thaw ps`", param="instance_id")
        model = _check(tx, source, event)
        move = Migration(
            f"m-{tx.next_token():x}",
            model.key,
            source.instance_id,
            event.at,
            "operator",
            request_id=event.request_id,
            node=event.node,
            device=event.device,
            waiter=event.waiter,
            wait=event.wait,
        )
        tx.put(move)
    except ThawError as e:
        tx.emit(ReplyTo(event.waiter, e.body()))


def _check(tx: Transaction, source: Instance, event: MigrationRequested) -> Model:
    """Return the model if the migration is possible.

    Raises:
        ThawError: It is not possible.
    """
    model = tx.state.models.get(source.model)
    if source.state is not InstanceState.READY and source.state is not InstanceState.DRAINING:
        raise Conflict(f"{source.label} is {source.state.value} and serves no request", param="instance_id")
    if model is None or source.generation != model.card.generation:
        raise Conflict(f"{source.model} was changed or removed. The old instance finishes its requests", param="instance_id")
    if not _can_move(model):
        raise UnsupportedParameter(f"{model.card.spec.engine} cannot continue another engine's response: {model.key} cannot move")
    if event.node:
        node = tx.state.nodes.get(event.node)
        if node is None:
            raise NotFound(f"No node {event.node!r}; see `thaw node list`", param="node")
        if event.device and event.device not in {x.device_id for x in node.devices}:
            raise NotFound(f"{event.node} has no device {event.device!r}", param="device")
        if event.node == source.node and (not event.device or source.device_ids == (event.device,)):
            raise InvalidRequest(f"{source.label} is on {event.node} already", param="node")
    elif event.device:
        raise InvalidRequest("The destination names a device without its node. Write --to NODE:DEVICE", param="device")
    for other in tx.state.migrations.values():
        if event.request_id is None and other.is_whole_instance and other.source == source.instance_id:
            raise Conflict(f"{source.label} is just being moved ({other.migration_id})")
        if other.destination == source.instance_id:
            raise Conflict(f"Requests are just being moved to {source.label} ({other.migration_id})")
    return model


def _can_move(model: Model) -> bool:
    """True if another engine can resume the model's requests, by its capabilities."""
    return model.card.capabilities.token_resume or model.card.capabilities.may_resume


def drain_node(tx: Transaction, name: str) -> None:
    """Step 1, for a drained node; what cannot migrate has `drain_timeout_s` to finish.

    A group moves as a whole when the node has any of its stages.
    """
    node = tx.state.nodes.get(name)
    if node is None or node.drain_since is None:
        return
    groups = {stage.first for stage in tx.state.later_stages.values() if stage.node == name}
    for i in (*tx.state.on_node(name), *(tx.state.instances[g] for g in sorted(groups) if g in tx.state.instances)):
        if i.state is InstanceState.READY and i.leaving == "no" and tx.idle_since(i.instance_id) is None:
            plan_migration(tx, i, "drain")


def plan_migration(tx: Transaction, i: Instance, reason: str, where: str = "", plan_id: str | None = None) -> bool:
    """Request the migration of all requests of an instance, if that is possible.

    Args:
        tx: The decision's transaction.
        i: The source.
        reason: Recorded with the migration.
        where: A device as node/device; empty: any.
        plan_id: The plan that needs the source's memory.

    Returns:
        True if a migration was created.
    """
    model = tx.state.models.get(i.model)
    if model is None or i.generation != model.card.generation or not _can_move(model):
        return False
    if tx.is_cooling_down(_cooldown_key(i.instance_id)) or any(
        m.is_whole_instance and m.source == i.instance_id for m in tx.state.migrations.values()
    ):
        return False
    node, _, device = where.partition("/")
    tx.put(Migration(f"m-{tx.next_token():x}", model.key, i.instance_id, tx.now, reason, node=node, device=device, plan_id=plan_id))
    return True


def _cooldown_key(instance_id: str) -> str:
    return f"move\0{instance_id}"


def apply_migration_record(tx: Transaction, record: MigrationRecord) -> None:
    """Step 4: a migrator, or the previous leader, has written the record."""
    if record.owner and record.state != "cancelled":
        _attend_others(tx, record)
    move = tx.state.migrations.get(record.migration_id)
    if move is None:
        if not record.over:
            tx.put(_migration_of(tx, record))
        elif _is_source_empty(record) and (source := tx.state.instances.get(record.source_instance)) is not None:
            stop_instance(tx, source, "drain", f"moved to {record.instance_id}")
        return
    if not record.over:
        if record != move.record:
            tx.put(replace(move, record=record, attended_at=tx.now, waiting_reason=""))
        return
    tx.drop(Migration, move.migration_id)
    learn_migration_times(tx, record)
    if move.waiter is not None and move.wait:
        tx.emit(ReplyTo(move.waiter, MigrationsViewed(migrations=(record,))))
    source = tx.state.instances.get(record.source_instance)
    if source is not None and move.is_whole_instance and record.state != "done":
        tx.put(Cooldown(_cooldown_key(record.source_instance), tx.now + RETRY_S))
        _count_failure(tx, move)
    elif record.state == "done" and move.reason == CONSOLIDATION:
        tx.drop(ConsolidationFailures, move.model)
        if record.at_most is not None:  # the next share waits for reports of the instances' load
            tx.put(Cooldown(_cooldown_key(record.source_instance), tx.now + SHARE_S))
    if source is not None and _is_source_empty(record):
        stop_instance(tx, source, "drain", f"moved to {record.instance_id}")


def _attend_others(tx: Transaction, record: MigrationRecord) -> None:
    """Let the other orders wait: the owner of `record` is busy with it, and claims one at a time.

    Those that have an owner are renewed too: it may have ended, and then the busy migrator
    continues them later.
    """
    for move in list(tx.state.migrations.values()):
        if move.record is not None and move.migration_id != record.migration_id:
            tx.put(replace(move, attended_at=tx.now))


def _is_source_empty(record: MigrationRecord) -> bool:
    return record.state == "done" and record.request_id is None and record.at_most is None


def _migration_of(tx: Transaction, record: MigrationRecord) -> Migration:
    return Migration(
        record.migration_id,
        record.model,
        record.source_instance,
        tx.now,
        record.reason,
        request_id=record.request_id,
        node=record.node,
        destination=record.instance_id,
        plan_id=record.plan_id,
        record=record,
        attended_at=tx.now,
    )


def advance_migrations(tx: Transaction) -> None:
    """Steps 2 and 3: find or start each destination, and order the migrations that are ready."""
    if not tx.state.migrations:
        return
    for move in sorted(tx.state.migrations.values(), key=lambda m: m.since):
        if move.record is None:
            _advance(tx, move)


def cancel_unattended(tx: Transaction, connected_since: float | None) -> None:
    """Cancel the orders that no migrator works on.

    Their requesters would wait for an hour, and the memory of their destinations would be kept.

    1. No migrator has claimed the order, or its owner has given it back, and none was busy with
       another order meanwhile.
    2. Its owner has sent no sign of life, no other migrator has taken its place, and none was busy
       with another order meanwhile.

    An order that is unchanged after the same time is cancelled again: the bucket did not answer.

    Args:
        tx: The decision's transaction.
        connected_since: As in `Tick`: signs of life are lost with the connection.
    """
    if connected_since is None:
        return
    for move in list(tx.state.migrations.values()):
        if move.record is None:
            continue
        limit_s, reason = (UNCLAIMED_S + LEASE_S, OWNER_GONE) if move.record.owner else (UNCLAIMED_S, NO_MIGRATOR)
        if tx.now - max(move.attended_at, connected_since) > limit_s:
            tx.put(replace(move, waiting_reason=reason, attended_at=tx.now))
            tx.emit(CancelMigration(move.record, Unavailable(reason, should_retry=True).body()))


def _advance(tx: Transaction, move: Migration) -> None:
    source = tx.state.instances.get(move.source)
    model = tx.state.models.get(move.model)
    if source is None or model is None or source.generation != model.card.generation:
        _fail_migration(tx, move, NotFound(f"The instance {move.source} has gone").body())
        return
    if move.reason == CONSOLIDATION and model.sleep_requested:
        tx.drop(Migration, move.migration_id)  # the group stops, and needs no successor
        return
    is_idle = tx.idle_since(move.source) is not None
    if move.waiter is None and is_idle and move.reason != CONSOLIDATION:
        tx.drop(Migration, move.migration_id)  # nothing is left to migrate; the source stops by itself
        return
    destination = _find_destination(tx, move, source, model) or _start_destination(tx, move, source, model)
    if destination is None:
        return
    if destination.instance_id != move.destination:
        move = replace(move, destination=destination.instance_id, waiting_reason="")
        tx.put(move)
    if destination.state is InstanceState.READY and is_idle and move.reason == CONSOLIDATION:
        tx.drop(Migration, move.migration_id)
        tx.drop(ConsolidationFailures, move.model)
        stop_instance(tx, source, "drain", f"{destination.instance_id} serves instead")
    elif destination.state is InstanceState.READY:
        _order(tx, move, source, destination)


def needs_successor(tx: Transaction, model: Model, group: Instance, own: str = "") -> bool:
    """True if a group needs one more whole instance to move its requests to.

    Of several groups, each may need one of its own.

    Args:
        tx: The decision's transaction.
        model: Its model.
        group: The group.
        own: The instance that was started for it, if any.
    """
    live = tx.state.live_instances(model)
    there = [i for i in live if i.stages == 1 and i.revision == group.revision]
    if any(i.instance_id == own for i in there):
        return False
    wanted = min(needed_workers(measure_demand(tx, model, live)), model.card.spec.replicas.max)
    groups = sum(1 for i in live if i.stages > 1 and i.state is InstanceState.READY)
    return not there or len(there) < min(wanted, groups)


def _find_destination(tx: Transaction, move: Migration, source: Instance, model: Model) -> Instance | None:
    """Return the least-loaded ready instance with the same weights, else one that is starting.

    Groups that are consolidated at the same time take different ones, as far as there are several.
    """
    if move.reason == CONSOLIDATION and needs_successor(tx, model, source, move.destination):
        return None
    there = [i for i in tx.state.of_model(move.model) if _can_be_destination(tx, move, source, i)]
    if move.reason == CONSOLIDATION:
        taken = {m.destination for m in tx.state.migrations.values() if m is not move and m.reason == CONSOLIDATION}
        own = [i for i in there if i.instance_id == move.destination]
        there = own or [i for i in there if i.instance_id not in taken] or there
    ready = [i for i in there if i.state is InstanceState.READY]
    if ready:
        return min(ready, key=lambda i: (_load(tx, i), i.instance_id))
    return min(there, key=lambda i: (i.is_claim, i.planned_at), default=None)


def _can_be_destination(tx: Transaction, move: Migration, source: Instance, i: Instance) -> bool:
    if (
        i.instance_id == source.instance_id
        or (i.stages > 1 and move.reason == CONSOLIDATION)
        or i.leaving != "no"
        or i.generation != source.generation
        or i.revision != source.revision
    ):
        return False
    if not (i.state is InstanceState.READY or i.state.starting or i.state is InstanceState.RESUMING):
        return False
    if i.node not in tx.state.nodes or tx.state.find_drained_node(i) is not None:
        return False
    return (not move.node or i.node == move.node) and (not move.device or i.device_ids == (move.device,))


def _load(tx: Transaction, i: Instance) -> int:
    report = tx.state.reports.get(i.instance_id)
    return report.status.load.active + report.status.load.waiting if report is not None else 0


def _start_destination(tx: Transaction, move: Migration, source: Instance, model: Model) -> Instance | None:
    """Start a new destination. Without room an operator's request fails, and a drain waits."""
    if move.destination:  # it was started, and has gone since
        why = model.error or "it did not become ready"
        _count_failure(tx, move)
        if _refuse(tx, move, Unavailable(f"{model.key} could not be started at the destination: {why}").body()):
            return None
        move = replace(move, destination="", waiting_reason=why)
        tx.put(move)
    if tx.is_cooling_down(_cooldown_key(move.source)):
        return None
    if move.reason == CONSOLIDATION:
        placement = place_whole_worker(tx, model, source)
    else:
        placement = place(tx, model, 0.0, only=(move.node, move.device) if move.node else None)
    if placement.chosen is None:
        if not _refuse(tx, move, InsufficientMemory(f"{model.key} has no room at the destination: {placement.reason}").body()):
            tx.put(replace(move, waiting_reason=placement.reason))
            tx.put(Cooldown(_cooldown_key(move.source), tx.now + tx.policy.refusal_cooldown_s))
        return None
    start_instance(tx, model, placement, CONSOLIDATION if move.reason == CONSOLIDATION else MIGRATE, tx.now, move.plan_id)
    plan = tx.plans[-1]
    return tx.state.instances[plan.instance_id or ""]


def _count_failure(tx: Transaction, move: Migration) -> None:
    """Back off before a group is consolidated again."""
    if move.reason == CONSOLIDATION and move.model in tx.state.models:
        known = tx.state.consolidation_failures.get(move.model) or ConsolidationFailures(move.model)
        attempts = known.attempts + 1
        tx.put(replace(known, attempts=attempts, not_before=tx.now + tx.policy.backoff_s(attempts)))


def _refuse(tx: Transaction, move: Migration, error: ErrorBody) -> bool:
    """Fail the migration unless its source stops in any case; return True if it failed."""
    if move.waiter is None and move.reason in ALWAYS_STOPS_SOURCE:
        return False
    _fail_migration(tx, move, error)
    return True


def _fail_migration(tx: Transaction, move: Migration, error: ErrorBody) -> None:
    tx.drop(Migration, move.migration_id)
    if move.waiter is not None:
        tx.emit(ReplyTo(move.waiter, error))


def _order(tx: Transaction, move: Migration, source: Instance, destination: Instance) -> None:
    """Step 3: write the record for the migrators."""
    times = migration_times_between(tx.state, move.model, source.node, destination.node)
    known = times if times.is_known else None
    record = MigrationRecord(
        migration_id=move.migration_id,
        token=tx.next_token(),
        model=move.model,
        revision=source.revision,
        source_instance=source.instance_id,
        source_node=source.node,
        instance_id=destination.instance_id,
        node=destination.node,
        request_id=move.request_id,
        reason=move.reason,
        plan_id=move.plan_id,
        at_most=_compute_share(tx, source, destination) if move.reason == CONSOLIDATION else None,
        created=tx.now,
        ms_per_token=known.per_token.value * 1e3 if known else None,
        ms_fixed=known.fixed.value * 1e3 if known else None,
    )
    tx.put(replace(move, record=record, attended_at=tx.now, waiting_reason=""))
    tx.emit(OrderMigration(record))
    if move.reason in ALWAYS_STOPS_SOURCE:
        stop_instance(tx, source, "drain", f"moving to {destination.instance_id}")
    if move.waiter is not None and not move.wait:
        tx.emit(ReplyTo(move.waiter, MigrationsViewed(migrations=(record,))))


def _compute_share(tx: Transaction, source: Instance, destination: Instance) -> int | None:
    """Return how many requests of a group the destination gets of several ready instances.

    None: all that are left.
    """
    model = tx.state.models[source.model]
    ready = [i for i in tx.state.live_instances(model) if i.stages == 1 and i.state is InstanceState.READY]
    left = _load(tx, source)
    others = sum(_load(tx, i) for i in tx.state.live_instances(model) if i.stages > 1 and i.instance_id != source.instance_id)
    share = share_requests(left + others, sum(_load(tx, i) for i in ready), len(ready), _load(tx, destination))
    return share if share < left else None


def cancel_waiter(tx: Transaction, waiter: str) -> None:
    """Remove a migration whose requester is gone, unless it is already ordered."""
    for move in list(tx.state.migrations.values()):
        if move.waiter == waiter:
            if move.is_ordered:
                tx.put(replace(move, waiter=None))
            else:
                tx.drop(Migration, move.migration_id)
