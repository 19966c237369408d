"""What nodes report, against what is believed. `NodeStatus` is the truth about live instances: belief gives way to it.

1. A report from before the latest one of the same nodeagent is ignored.
2. A token of a newer epoch: another leader has been at work (or the database was lost): step down and lead again above it.
3. An instance that is known: its state is taken over (ready, failed, stopped, draining).
4. One that is not known but lives: adopted if it is still wanted, else stopped.
5. One that is believed but missing from a report that should have it: gone.
"""

from __future__ import annotations

from services.scheduler.domain.demand.slo import count_completed
from services.scheduler.domain.effects import StepDown
from services.scheduler.domain.estimates.memory_needs import learn_need
from services.scheduler.domain.lifecycle.failures import crashed, refused, resume_refused, stalled, start_failed
from services.scheduler.domain.lifecycle.park_attempts import being_parked, failed
from services.scheduler.domain.lifecycle.transitions import became_ready, became_suspended, conclude, send_stop, stays_suspended
from services.scheduler.domain.state.entities import Device, Instance, Leaving, Node
from services.scheduler.domain.state.transaction import TOKENS_PER_EPOCH, Draft
from services.scheduler.domain.state.volatile import LoaderPresence, Presence, Seen
from services.scheduler.domain.values import replace
from shared.contracts.base import ErrorBody
from shared.contracts.node import RESERVATION, InstanceState, InstanceStatus, NodeStatus
from shared.errors import EngineFailed, InsufficientMemory, ThawError


def hear_node(d: Draft, status: NodeStatus) -> None:
    previous = d.state.presence.get(status.node)
    old = previous.status if previous else None
    if old is not None and old.boot_id == status.boot_id and status.seq < old.seq:  # 1
        return
    newest = max((i.token // TOKENS_PER_EPOCH for i in status.instances), default=0)
    if newest > d.state.epoch:  # 2
        d.emit(StepDown(newest))
        return
    d.put(Presence(status.node, d.now, True, status))
    known = d.state.nodes.get(status.node) or Node(status.node)
    devices = tuple(Device(v.device_id, v.kind, v.name, v.budget_bytes) for v in status.devices)
    d.put(replace(known, boot_id=status.boot_id, labels=dict(status.labels), devices=devices))
    reported = set()
    for s in status.instances:
        reported.add(s.instance_id)
        instance = d.state.instances.get(s.instance_id)
        if instance is not None and instance.resumes:
            _waits_to_resume(d, instance, s)
        elif instance is not None and not instance.claim:
            _known(d, instance, s)  # 3
        elif instance is None and (s.state.holds_memory or s.state.parked):
            _unknown(d, status.node, s)  # 4
    for i in list(d.state.on_node(status.node)):
        if i.instance_id not in reported and (i.resumes or not i.claim):
            _missing(d, i, status)  # 5


def _known(d: Draft, i: Instance, s: InstanceStatus) -> None:
    count_completed(d, d.state.seen.get(s.instance_id), s)
    d.put(_seen(d, s))
    learn_need(d, s)
    match s.state:
        case InstanceState.READY if i.ready_at is None:
            became_ready(d, i, s)
        case InstanceState.FAILED if i.state.parked:
            conclude(d, i, "failed", "its process ended while it was suspended", s.error)
            failed(d, i.model, "its process ended while it was suspended")
        case InstanceState.FAILED if i.ready_at is None and _no_room(s):
            refused(d, i)
        case InstanceState.FAILED if i.ready_at is None:
            start_failed(d, i, s.error or EngineFailed(f"the start of {i.label} failed on {i.node}").body())
        case InstanceState.FAILED:
            crashed(d, i, s.error or EngineFailed(f"{i.label} failed on {i.node}").body())
        case InstanceState.STOPPED if i.leaving == "no" and i.ready_at is None:
            start_failed(d, i, s.error or EngineFailed(f"{i.label} stopped on {i.node} before it was ready").body())
        case InstanceState.STOPPED:
            if being_parked(i) and i.leaving in ("suspend", "suspend_if_idle"):
                failed(d, i.model, f"it was stopped, not suspended: {s.suspension.reason or 'its node gives no reason'}")
            conclude(d, i, "cancelled", i.leave_reason)
        case InstanceState.DRAINING:
            how: Leaving = "suspend" if i.leaving in ("suspend", "suspend_if_idle") else "drain"
            d.put(replace(i, state=s.state, leaving=how, leave_reason=i.leave_reason or "drained on its node"))
        case InstanceState.SUSPENDED | InstanceState.ASLEEP:
            _suspended(d, i, s)
        case _:
            if i.state is not s.state:
                d.put(replace(i, state=s.state))
            overdue = i.stop_at is not None and d.now - i.stop_at > d.policy.stop_repeat
            if i.leaving != "no" and overdue:
                send_stop(d, i)


def _suspended(d: Draft, i: Instance, s: InstanceStatus) -> None:
    """1. Its resumption has waited there for room in vain. 2. It is on its way there, or waits. 3. Suspended just now. 4. It was, and is to go
    for good."""
    resuming = i.state is InstanceState.RESUMING
    if resuming and s.token >= i.token and s.error is not None and _no_room(s):  # 1
        resume_refused(d, i, s.error)
    elif resuming and i.sent_at is not None and d.now - i.sent_at <= d.policy.absence_grace + d.policy.grant_wait:  # 2
        return
    elif resuming:
        stays_suspended(d, i, "its node did not resume it")
    elif not i.state.parked:  # 3
        became_suspended(d, i, s)
    elif i.leaving != "no" and i.stop_at is not None and d.now - i.stop_at > d.policy.stop_repeat:  # 4
        send_stop(d, i)


def _no_room(s: InstanceStatus) -> bool:
    """Whether its node has kept it waiting for bytes until its time was over."""
    return s.error is not None and (s.error.code, s.error.param) == (InsufficientMemory.code, RESERVATION)


def _waits_to_resume(d: Draft, i: Instance, s: InstanceStatus) -> None:
    """A suspended instance whose bytes are promised to it: it may have gone meanwhile, or have come back by itself."""
    d.put(_seen(d, s))
    if s.state in (InstanceState.STOPPED, InstanceState.FAILED):
        conclude(d, i, "cancelled", "it ended while it waited for room")
    elif s.state is InstanceState.READY:
        became_ready(d, i, s)


def _seen(d: Draft, s: InstanceStatus) -> Seen:
    idle = s.state is InstanceState.READY and s.load.active == 0 and s.load.waiting == 0
    since = d.now - s.load.idle_ms / 1e3
    old = d.state.seen.get(s.instance_id)
    if idle and old and old.idle_since is not None and old.status.load.completed == s.load.completed:
        since = min(since, old.idle_since)
    moved = old is None or progress(old.status) != progress(s)
    return Seen(s.instance_id, s, since if idle else None, d.now if old is None or moved else old.moved_at)


def progress(s: InstanceStatus) -> tuple[object, ...]:
    """What changes while a start gets on."""
    return (s.state, s.phase, s.progress, s.memory.weights, s.memory.private, len(s.phases))


def _unknown(d: Draft, node: str, s: InstanceStatus) -> None:
    model = d.state.models.get(s.model)
    wanted = (
        model is not None
        and s.generation == model.card.generation
        and s.revision == model.card.info.revision
        and len(d.state.live(model)) < model.card.spec.replicas.max
        and s.state is not InstanceState.DRAINING
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
        kv_bytes=s.memory.kv,
        requested_at=d.now,
        planned_at=d.now,
        state=s.state,
        sent_at=d.now,
        ready_at=d.now if ready or s.state.parked else None,
        trigger="adopted",
        traceparent=s.traceparent,
        leaving="no" if wanted else "drain",
        leave_reason="" if wanted else "not wanted: unknown to the scheduler, replaced or out of date",
    )
    d.put(_seen(d, s))
    d.put(adopted)
    if not wanted and s.state is not InstanceState.DRAINING:
        send_stop(d, adopted)


def _missing(d: Draft, i: Instance, status: NodeStatus) -> None:
    fresh = i.sent_at is not None and d.now - i.sent_at <= d.policy.absence_grace
    if fresh or status.seq < 2:
        return
    if i.leaving != "no":
        conclude(d, i, "cancelled", i.leave_reason)
    else:
        lost(d, i, f"{i.node} does not report it (any more)")


def lost(d: Draft, i: Instance, why: str) -> None:
    """The instance is gone without its own doing: not counted against the model, its demand is placed anew."""
    error: ErrorBody = ThawError(f"{i.label} was lost: {why}").body()
    conclude(d, i, "cancelled" if i.claim else "failed", why, error)


def end_stalled_starts(d: Draft) -> None:
    """Stop starts that have not got on for longer than their nodeagent should have let them."""
    for i in d.due():
        seen = d.state.seen.get(i.instance_id)
        model = d.state.models.get(i.model)
        if i.leaving != "no" or seen is None or model is None or not seen.status.state.starting:
            continue
        limit = model.card.spec.init_timeout
        if d.now - seen.moved_at > limit + d.policy.init_grace:
            text = f"the start of {i.label} made no progress on {i.node} for {limit:g} s; init_timeout sets this limit"
            stalled(d, i, EngineFailed(text).body())


def lose_silent_nodes(d: Draft) -> None:
    """A node that was silent for too long is dead until it is heard again, and its instances with it; after a day it is forgotten."""
    for presence in list(d.state.presence.values()):
        if not presence.alive and d.now - presence.heard_at > d.policy.node_forgotten_after:
            d.drop(Presence, presence.node)
            d.drop(LoaderPresence, presence.node)
            d.drop(Node, presence.node)
        elif presence.alive and d.now - presence.heard_at > d.policy.node_lost_after:
            d.put(replace(presence, alive=False))
            for i in list(d.state.on_node(presence.node)):
                lost(d, i, f"its node {presence.node} has been silent for {d.policy.node_lost_after:.0f} s")
