"""Reconcile the believed state with node reports; `NodeStatus` is the truth about instances.

1. A report older than the latest one of the same nodeagent is ignored.
2. A token of a newer epoch shows another leader (or a lost database): step down and lead above it.
3. A known instance takes the reported state (ready, failed, stopped, draining), and a start the
   device that its node has bound it to.
4. An unknown running instance is adopted if its model needs it, otherwise stopped.
5. A known instance that a report omits is gone, unless its start may not have arrived yet.

A report of changes examines only the instances that have changed.
"""

from __future__ import annotations

from services.scheduler.domain.effects import ForgetNode, StepDown
from services.scheduler.domain.estimates.memory_needs import learn_memory
from services.scheduler.domain.estimates.start_learning import forget_starts_on
from services.scheduler.domain.estimates.token_times import learn_token_time
from services.scheduler.domain.lifecycle.deliveries import is_underway
from services.scheduler.domain.lifecycle.failures import (
    on_crash,
    on_resume_refused,
    on_start_failed,
    on_start_refused,
    on_start_stalled,
)
from services.scheduler.domain.lifecycle.groups import apply_stage_statuses
from services.scheduler.domain.lifecycle.park_attempts import is_parking, record_park_failure
from services.scheduler.domain.lifecycle.transitions import (
    bind_start,
    cancel_resume,
    mark_ready,
    mark_suspended,
    remove_instance,
    send_stop,
)
from services.scheduler.domain.state.entities import Device, Instance, Leaving, Model, Node
from services.scheduler.domain.state.transaction import TOKENS_PER_EPOCH, Transaction
from services.scheduler.domain.state.volatile import InstanceReport, LoaderPresence, Presence
from services.scheduler.domain.values import replace
from shared.contracts.base import ErrorBody
from shared.contracts.node import RESERVATION, InstanceState, InstanceStatus, NodeStatus
from shared.errors import EngineFailed, InsufficientMemory, ThawError
from shared.sizing import need_of

_BEFORE_READY = (InstanceState.PREPARING, InstanceState.LOADING)
"""States in which a start takes the device that its node reports. A resume keeps its devices."""


def apply_node_status(tx: Transaction, status: NodeStatus, changed: frozenset[str] | None = None) -> None:
    """Apply a node's status.

    Args:
        changed: The instances that differ from the last status; None: any may.
    """
    previous = tx.state.presence.get(status.node)
    old = previous.status if previous else None
    if previous is None or old is None or not previous.alive:
        changed = None  # its instances may have been given up meanwhile
    if old is not None and old.boot_id == status.boot_id and status.seq < old.seq:  # 1
        return
    newest = max((i.token // TOKENS_PER_EPOCH for i in status.instances), default=0)
    if newest > tx.state.epoch:  # 2
        tx.emit(StepDown(newest))
        return
    tx.put(_presence_of(tx, previous, status))
    known = tx.state.nodes.get(status.node) or Node(status.node)
    devices = tuple(Device(v.device_id, v.kind, v.name, v.budget_bytes) for v in status.devices)
    tx.put(replace(known, boot_id=status.boot_id, labels=dict(status.labels), devices=devices))
    reported = set()
    apply_stage_statuses(tx, status)
    for s in status.instances:
        if s.is_later_stage:
            continue
        reported.add(s.instance_id)
        if changed is not None and s.instance_id not in changed:
            continue
        instance = tx.state.instances.get(s.instance_id)
        if instance is not None and instance.is_resume_claim:
            _update_resume_claim(tx, instance, s)
        elif instance is not None and not instance.is_claim:
            learn_token_time(tx, instance, s.load)
            _update_known(tx, instance, s)  # 3
        elif instance is None and (s.state.holds_memory or s.state.parked):
            _adopt_or_stop(tx, status.node, s)  # 4
    for i in list(tx.state.on_node(status.node)):
        if i.instance_id not in reported and (i.is_resume_claim or not i.is_claim):
            _on_missing(tx, i, status)  # 5


def _presence_of(tx: Transaction, previous: Presence | None, status: NodeStatus) -> Presence:
    before = previous.ending_since if previous is not None else {}
    failed = [s.instance_id for s in status.instances if s.state is InstanceState.FAILED and s.memory.reserved]
    since = {instance_id: before.get(instance_id, tx.now) for instance_id in failed}
    stuck = frozenset(instance_id for instance_id in failed if tx.now - since[instance_id] > tx.policy.stuck_after_s)
    return Presence(status.node, tx.now, True, status, since, stuck)


def _update_known(tx: Transaction, i: Instance, s: InstanceStatus) -> None:
    if s.bound_by and s.device_ids != i.device_ids and i.ready_at is None and i.state in _BEFORE_READY:
        i = bind_start(tx, i, s)
    if i.leaving != "no" and i.stop_at is None and (s.state is InstanceState.READY or s.state.starting):
        i = replace(i, leaving="no", leave_reason="")  # its node drained it, by no command of this scheduler, and kept it
        tx.put(i)
    tx.put(_report_of(tx, s))
    learn_memory(tx, s)
    match s.state:
        case InstanceState.READY if i.ready_at is None:
            mark_ready(tx, i, s)
        case InstanceState.FAILED if i.state.parked:
            remove_instance(tx, i, "failed", "its process ended while it was suspended", s.error)
            record_park_failure(tx, i.model, "its process ended while it was suspended")
        case InstanceState.FAILED if i.ready_at is None and _has_timed_out_for_memory(s):
            on_start_refused(tx, i)
        case InstanceState.FAILED if i.ready_at is None:
            on_start_failed(tx, i, s.error or EngineFailed(f"The start of {i.label} failed on {i.node}").body())
        case InstanceState.FAILED:
            on_crash(tx, i, s.error or EngineFailed(f"{i.label} failed on {i.node}").body())
        case InstanceState.STOPPED if i.leaving == "no" and i.ready_at is None:
            on_start_failed(tx, i, s.error or EngineFailed(f"{i.label} stopped on {i.node} before it was ready").body())
        case InstanceState.STOPPED:
            if is_parking(i) and i.leaving in ("suspend", "suspend_if_idle"):
                record_park_failure(
                    tx, i.model, f"it was stopped, not suspended: {s.suspension.reason or 'its node gives no reason'}"
                )
            remove_instance(tx, i, "cancelled", i.leave_reason)
        case InstanceState.DRAINING:
            how: Leaving = "suspend" if i.leaving in ("suspend", "suspend_if_idle") else "drain"
            tx.put(replace(i, state=s.state, leaving=how, leave_reason=i.leave_reason or "drained on its node"))
        case InstanceState.SUSPENDED | InstanceState.ASLEEP:
            _update_suspended(tx, i, s)
        case _:
            if i.state is not s.state:
                tx.put(replace(i, state=s.state))
            overdue = i.stop_at is not None and tx.now - i.stop_at > tx.policy.stop_retry_s
            if i.leaving != "no" and overdue:
                send_stop(tx, i)


def _update_suspended(tx: Transaction, i: Instance, s: InstanceStatus) -> None:
    """Update a suspended instance.

    1. Its resumption waited on the node in vain.
    2. Its resumption is under way.
    3. It has just been suspended.
    4. It was suspended and is to be stopped.
    """
    resuming = i.state is InstanceState.RESUMING
    if resuming and s.token >= i.token and s.error is not None and _has_timed_out_for_memory(s):  # 1
        on_resume_refused(tx, i, s.error)
    elif resuming and is_underway(tx, i.instance_id, i.sent_at, tx.policy.absence_grace_s + tx.policy.grant_wait_s):  # 2
        return
    elif resuming:
        cancel_resume(tx, i, "its node did not resume it")
    elif not i.state.parked:  # 3
        mark_suspended(tx, i, s)
    elif i.leaving != "no" and i.stop_at is not None and tx.now - i.stop_at > tx.policy.stop_retry_s:  # 4
        send_stop(tx, i)


def _has_timed_out_for_memory(s: InstanceStatus) -> bool:
    """True if its node let it wait for memory until the time limit."""
    return s.error is not None and (s.error.code, s.error.param) == (InsufficientMemory.code, RESERVATION)


def _update_resume_claim(tx: Transaction, i: Instance, s: InstanceStatus) -> None:
    """Update a suspended instance with promised memory: it may have ended, or resumed by itself."""
    tx.put(_report_of(tx, s))
    if s.state in (InstanceState.STOPPED, InstanceState.FAILED):
        remove_instance(tx, i, "cancelled", "it ended while it waited for room")
    elif s.state is InstanceState.READY:
        mark_ready(tx, i, s)


def _report_of(tx: Transaction, s: InstanceStatus) -> InstanceReport:
    idle = s.state is InstanceState.READY and s.load.active == 0 and s.load.waiting == 0
    since = tx.now - s.load.idle_ms / 1e3
    old = tx.state.reports.get(s.instance_id)
    if idle and old and old.idle_since is not None and old.status.load.completed == s.load.completed:
        since = min(since, old.idle_since)
    moved = old is None or progress(old.status) != progress(s)
    progressed_at = tx.now if old is None or moved else old.progressed_at
    was_ready = old is not None and old.status.state is InstanceState.READY
    completed_before = old.completed_before if old is not None and was_ready else s.load.completed
    # Without an earlier report the leader has changed, or its node was away.
    first_counted = tx.now if completed_before else None
    counted_since = first_counted if old is None else old.counted_since
    load_changed_at = old.load_changed_at if old is not None and old.status.load == s.load else tx.now
    leaving_since = _find_leaving_since(tx, s, old)
    is_stuck = leaving_since is not None and tx.now - leaving_since > tx.policy.drain_timeout_s + tx.policy.stuck_after_s
    return InstanceReport(
        s.instance_id,
        s,
        since if idle else None,
        progressed_at,
        completed_before,
        counted_since,
        load_changed_at,
        leaving_since,
        is_stuck,
    )


def _find_leaving_since(tx: Transaction, s: InstanceStatus, old: InstanceReport | None) -> float | None:
    i = tx.state.instances.get(s.instance_id)
    if i is None or i.leaving == "no":
        return None
    return old.leaving_since if old is not None and old.leaving_since is not None else tx.now


def progress(s: InstanceStatus) -> tuple[object, ...]:
    """Return the part of a report that changes while a start makes progress."""
    return (s.state, s.phase, s.progress, s.memory.weights, s.memory.private, len(s.phases))


def _adopt_or_stop(tx: Transaction, node: str, s: InstanceStatus) -> None:
    model = tx.state.models.get(s.model)
    wanted = (
        model is not None
        and s.generation == model.card.generation
        and s.revision == model.card.info.revision
        and len(tx.state.live_instances(model)) < model.card.spec.replicas.max
        and s.state is not InstanceState.DRAINING
        and s.group is None  # its other stages may be gone
    )
    ready = s.state is InstanceState.READY
    adopted = Instance(
        instance_id=s.instance_id,
        plan_id=s.plan_id,
        model=s.model,
        generation=s.generation,
        revision=s.revision,
        node=node,
        device_ids=s.device_ids,
        token=s.token,
        reserve_bytes=s.suspension.need_bytes if s.state.parked else s.memory.reserved,
        kv_bytes=_find_kv_bytes(model, s),
        requested_at=tx.now,
        planned_at=tx.now,
        state=s.state,
        sent_at=tx.now,
        ready_at=tx.now if ready or s.state.parked else None,
        trigger="adopted",
        traceparent=s.traceparent,
        leaving="no" if wanted else "drain",
        leave_reason="" if wanted else "not wanted: unknown to the scheduler, replaced or out of date",
    )
    tx.put(_report_of(tx, s))
    tx.put(adopted)
    if not wanted and s.state is not InstanceState.DRAINING:
        send_stop(tx, adopted)


def _find_kv_bytes(model: Model | None, s: InstanceStatus) -> int:
    """Return the bytes of an instance's KV cache. Its report has only what is in use of them."""
    if model is not None and s.generation == model.card.generation:
        return need_of(model.card).kv
    return min(max(0, s.memory.kv), s.memory.reserved)


def _on_missing(tx: Transaction, i: Instance, status: NodeStatus) -> None:
    if is_underway(tx, i.instance_id, i.sent_at, tx.policy.absence_grace_s) or status.seq < 2:
        return
    if i.leaving != "no":
        remove_instance(tx, i, "cancelled", i.leave_reason)
    else:
        _remove_lost(tx, i, f"{i.node} does not report it (any more)")


def _remove_lost(tx: Transaction, i: Instance, why: str) -> None:
    """Remove an instance that vanished without a failure; its demand is placed again."""
    error: ErrorBody = ThawError(f"{i.label} was lost: {why}").body()
    remove_instance(tx, i, "cancelled" if i.is_claim else "failed", why, error)


def stop_stalled_starts(tx: Transaction) -> None:
    """Stop starts without progress that their nodeagent should have ended."""
    for i in tx.due_instances():
        report = tx.state.reports.get(i.instance_id)
        model = tx.state.models.get(i.model)
        if i.leaving != "no" or report is None or model is None or not report.status.state.starting:
            continue
        limit = model.card.spec.init_timeout
        if tx.now - report.progressed_at > limit + tx.policy.init_grace_s:
            text = f"the start of {i.label} made no progress on {i.node} for {limit:g} s; init_timeout sets this limit"
            on_start_stalled(tx, i, EngineFailed(text).body())


def expire_silent_nodes(tx: Transaction, due: float) -> None:
    """Mark silent nodes as dead, with their instances; remove them after a day.

    A loader without a known nodeagent is removed after a day too.

    Args:
        due: The time of the tick. While it waited for its decision, messages of nodes waited too.
    """
    for presence in list(tx.state.presence.values()):
        if not presence.alive and due - presence.last_message_at > tx.policy.node_forgotten_after_s:
            forget_node(tx, presence.node)
        elif presence.alive and due - presence.last_message_at > tx.policy.node_lost_after_s:
            tx.put(replace(presence, alive=False))
            for i in list(tx.state.on_node(presence.node)):
                _remove_lost(tx, i, f"its node {presence.node} has been silent for {tx.policy.node_lost_after_s:.0f} s")
    alone = [loader for loader in tx.state.loaders.values() if loader.node not in tx.state.presence]
    for loader in alone:
        if due - loader.last_message_at > tx.policy.node_forgotten_after_s:
            forget_node(tx, loader.node)


def forget_node(tx: Transaction, node: str) -> None:
    """Remove a lost node, which has no instances any more. If it reports again, it is a new one."""
    forget_starts_on(tx, node)
    tx.drop(Presence, node)
    tx.drop(LoaderPresence, node)
    tx.drop(Node, node)
    tx.emit(ForgetNode(node))
