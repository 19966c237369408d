"""Fair shares of the API keys whose models compete for devices (ADR 0096, ADR 0099).

Start-time fair queueing over device-seconds. A key's tag is what it was charged:

1. A start is charged with its predicted seconds to the keys whose requests wait for the model, in
   proportion to their number.
2. While any model waits for room, an instance in use is charged to the keys whose requests used
   its model when some waited for it last.

Both count in proportion to the memory that the instance takes of its devices, and are divided by
the key's weight. Waiting models of the key with the smallest tag are placed first, and serving
models of a key that is far enough ahead give way (`may_interrupt`).

An instance is in use while it serves, and then for as long as its start took (`kept_s`): its next
request probably arrives sooner than it could be had back. An idle instance in use gives way only to
keys that have received less (`is_shielded`).

A key that begins to wait starts at the smallest tag that a waiting key had before its last start,
or `TURN_S` ago: idle time gives no credit, and its first model goes first. Shares hold among
requests of one priority. Prewarming, wakes and `replicas.min` are charged to no key.

When models begin to wait for room after `FORGET_S` in which none did, keys begin at most `TURN_S`
ahead, as those do that use instances: until then none took anything from another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from services.scheduler.domain.state.booking import device_key
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.device_memory import per_device_bytes
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import KeyShare, ModelDemand, ModelUsers, ShareClock, share_key
from services.scheduler.domain.values import value
from shared.contracts.demand import KeyDemand
from shared.contracts.node import InstanceState

Flow = tuple[str, int]
"""The opaque id of a key, and a priority."""
NO_KEY = (KeyDemand(waiting=1),)
"""Requests of gateways that do not report keys, and wakes."""
TURN_S = 2.0
"""A key that is this many device-seconds ahead gives way to another one, if starts cost nothing."""
RESTARTS = 4.0
"""A key keeps an instance for so many times as long as it takes to have it back."""
IDLE_RESTARTS = 2.0
"""The same for an instance that is idle between two requests: less is lost if it leaves."""
KEPT_LEAST_S, KEPT_MOST_S = 0.5, 5.0
"""Bounds of the time for which an idle instance counts as in use.

A node reports within about 0.1 s that an instance serves again. The upper bound frees memory that
no request uses soon, however long the restart takes.
"""
FORGET_S = 60.0
"""Greater differences of tags are forgotten if no model has waited for room for this long."""
MAX_SHARES = 1024
"""Maximum number of tags. Beyond it the smallest of keys without waiting requests are dropped."""
_LONGEST_S = 1.0
"""At most this much time is charged at once: the scheduler may have paused."""


@value(frozen=True, slots=True)
class Standing:
    """Where a waiting model stands among the keys.

    Attributes:
        priority: The highest priority of its waiting requests.
        tag_s: The smallest tag of the keys with requests of that priority.
        flows: All keys whose requests wait for it, each with a priority.
    """

    priority: int
    tag_s: float
    flows: frozenset[Flow] = frozenset()


def standing_of(state: ClusterState, model: str) -> Standing:
    """Return the standing of a model whose requests wait."""
    demand = state.demand.get(model)
    keys = [k for k in demand.keys if k.waiting] if demand is not None else []
    keys = keys or list(NO_KEY)
    priority = max([k.priority for k in keys])
    tag_s = min([_tag(state, k.flow, k.priority) for k in keys if k.priority == priority])
    return Standing(priority, tag_s, frozenset([(k.flow, k.priority) for k in keys]))


def _tag(state: ClusterState, flow: str, priority: int) -> float:
    share = state.key_shares.get(share_key(flow, priority))
    return share.tag_s if share is not None else 0.0


def begin_waiting(tx: Transaction, model: str, before: ModelDemand | None) -> None:
    """Take note of the keys whose requests begin to wait, after the model's demand has changed.

    Args:
        tx: The decision's transaction, with the new demand.
        model: The model.
        before: Its demand before.
    """
    demand = tx.state.demand.get(model)
    if demand is not None and demand.waiting:
        tx.put(ModelUsers(model, demand.keys or NO_KEY))
    new = _flows(demand) - _flows(before)
    for flow, priority in sorted(new):
        if any((flow, priority) in _flows(d) for name, d in tx.state.demand.items() if name != model):
            continue  # it waits for another model already: usually one of the first that are looked at
        waiting = {f for d in tx.state.demand.values() for f in _flows(d)} - new
        shares = [tx.state.key_shares.get(share_key(f, p)) for f, p in waiting if p == priority]
        floor = min([share.start_s if share is not None else 0.0 for share in shares], default=0.0)
        if floor > _tag(tx.state, flow, priority):
            tx.put(KeyShare(flow, priority, floor, floor))


def _flows(demand: ModelDemand | None) -> set[Flow]:
    """Return the keys whose requests wait for a model, with their priorities."""
    if demand is None or not demand.waiting:
        return set()
    return {(k.flow, k.priority) for k in demand.keys or NO_KEY if k.waiting}


def charge_start(tx: Transaction, i: Instance, seconds: float) -> None:
    """Charge a start to the keys whose requests wait for the model.

    Args:
        tx: The decision's transaction.
        i: The instance that starts.
        seconds: Predicted duration.
    """
    demand = tx.state.demand.get(i.model)
    if demand is None or not demand.waiting:
        return
    for flow, part in _parts([k for k in demand.keys if k.waiting] or NO_KEY).items():
        start = _tag(tx.state, *flow)
        tx.put(KeyShare(*flow, start + seconds * _devices_taken(tx.state, i) * part, start))
    if len(tx.state.key_shares) > MAX_SHARES:
        _forget_idle(tx)


def charge_use(tx: Transaction) -> None:
    """Charge the time since the last call to the keys of instances in use, if any model waits."""
    clock = tx.state.share_clock.get("")
    if not tx.state.unschedulable:
        if clock is not None and clock.runs:
            tx.put(ShareClock(clock.at, runs=False))
        return
    tx.put(ShareClock(tx.now))
    if clock is None or tx.now - clock.at > FORGET_S:
        _forget_differences(tx)
        return
    elapsed = min(tx.now - clock.at, _LONGEST_S) if clock.runs else 0.0
    if elapsed <= 0:
        return
    charged: dict[Flow, float] = defaultdict(float)
    for i, users in _list_used(tx):
        for flow, part in _parts(users.keys).items():
            charged[flow] += elapsed * _devices_taken(tx.state, i) * part
    for flow, seconds in sorted(charged.items()):
        share = tx.state.key_shares.get(share_key(*flow)) or KeyShare(*flow, 0.0)
        tag_s = share.tag_s + seconds
        tx.put(KeyShare(*flow, tag_s, max(share.start_s, tag_s - TURN_S)))


def _forget_differences(tx: Transaction) -> None:
    """Let no key be more than `TURN_S` ahead, and those that use instances just as much."""
    used = {flow for _, users in _list_used(tx) for flow in _parts(users.keys)}
    known = {(share.flow, share.priority): share.tag_s for share in tx.state.key_shares.values()}
    for flow in sorted({*used, *known}):
        tx.put(KeyShare(*flow, TURN_S if flow in used else min(known[flow], TURN_S)))


def _list_used(tx: Transaction) -> list[tuple[Instance, ModelUsers]]:
    """Return the instances in use whose users are known."""
    found = []
    for report in tx.state.reports.values():
        users = tx.state.model_users.get(report.status.model)
        i = tx.state.instances.get(report.instance_id)
        if users is not None and i is not None and i.state is InstanceState.READY and is_in_use(i, report.idle_since, tx.now):
            found.append((i, users))
    return found


def is_in_use(i: Instance, idle_since: float | None, now: float) -> bool:
    """True if a ready instance serves (`idle_since` is None), or probably will again soon."""
    return idle_since is None or now - idle_since < kept_s(i)


def kept_s(i: Instance) -> float:
    """Return the seconds after its last request for which an idle instance counts as in use.

    That is how long its start took, within bounds: keeping the memory for longer would cost more
    than to start it again.
    """
    if i.ready_at is None:
        return KEPT_LEAST_S
    began = i.sent_at if i.sent_at is not None else i.planned_at
    return min(max(i.ready_at - began, KEPT_LEAST_S), KEPT_MOST_S)


def interrupt_lead_s(reload_s: float) -> float:
    """Return how many device-seconds a key is ahead when its serving instance gives way.

    Args:
        reload_s: Seconds to have the instance back.
    """
    return TURN_S + RESTARTS * reload_s


def may_interrupt(state: ClusterState, waiting: Standing, victim: str, reload_s: float) -> bool:
    """True if a serving instance gives way to a waiting model.

    It does if all requests that used it lately have a lower priority, or if they have the same and
    their keys have received so much more.

    Args:
        state: The cluster.
        waiting: The standing of the waiting model.
        victim: The model of the serving instance.
        reload_s: Seconds to have the instance back.
    """
    users = state.model_users.get(victim)
    return users is not None and _has_received_more(state, waiting, _flows_of(users), interrupt_lead_s(reload_s))


def is_shielded(tx: Transaction, waiting: Standing, victim: str, reload_s: float, *, is_idle: bool) -> bool:
    """True if shares of keys keep an instance in use from a waiting model.

    1. Only keys that wait for the model themselves use the instance: no.
    2. The others have a higher priority: yes; a lower one: no.
    3. They have received more, by a multiple of the restart: no. Keys that wait for room themselves
       would give the idle instance up for a model of their own: they must have received less.

    Args:
        tx: The decision's transaction.
        waiting: The standing of the waiting model.
        victim: The model of the instance in use.
        reload_s: Seconds to have the instance back.
        is_idle: It is idle between two requests.
    """
    users = tx.state.model_users.get(victim)
    others = _flows_of(users) - waiting.flows if users is not None else frozenset()
    if not others:  # 1
        return False
    lead_s = interrupt_lead_s(reload_s)
    if is_idle:
        gives_up = not others.isdisjoint(_flows_without_room(tx))
        lead_s = 0.0 if gives_up else max(TURN_S, IDLE_RESTARTS * reload_s)
    return not _has_received_more(tx.state, waiting, others, lead_s)  # 2, 3


def has_other_users(tx: Transaction, waiting: Standing) -> bool:
    """True if other keys than those that wait for a model have used any."""
    return not tx.memoize("flows of users", lambda: _flows_of_all(tx.state)) <= waiting.flows


def is_used_only_by(state: ClusterState, flows: frozenset[Flow], model: str) -> bool:
    """True if the requests that used a model were of these keys."""
    users = state.model_users.get(model)
    return users is not None and _flows_of(users) <= flows


def _flows_of_all(state: ClusterState) -> frozenset[Flow]:
    return frozenset([(k.flow, k.priority) for users in state.model_users.values() for k in users.keys])


def _flows_of(users: ModelUsers) -> frozenset[Flow]:
    return frozenset([(k.flow, k.priority) for k in users.keys])


def _has_received_more(state: ClusterState, waiting: Standing, users: frozenset[Flow], lead_s: float) -> bool:
    """True if the users have a lower priority than a waiting model, or the same and such a lead."""
    priority = max([p for _, p in users])
    if waiting.priority != priority:
        return waiting.priority > priority
    received = min([_tag(state, flow, p) for flow, p in users if p == priority])
    return received - waiting.tag_s >= lead_s


def _flows_without_room(tx: Transaction) -> frozenset[Flow]:
    """Return the keys that wait for a model which has no instance, not even one that starts."""

    def find() -> frozenset[Flow]:
        waiting = [d for d in tx.state.demand.values() if d.waiting]
        return frozenset().union(*[_flows(d) for d in waiting if not _has_instance(tx.state, d.model)])

    return tx.memoize("flows without room", find)


def _has_instance(state: ClusterState, name: str) -> bool:
    model = state.models.get(name)
    return model is not None and bool(state.live_instances(model))


def _parts(keys: Sequence[KeyDemand]) -> dict[Flow, float]:
    """Return what each key and priority pays of a device-second, divided by the key's weight.

    Keys without requests pay nothing.
    """
    total = sum([k.waiting + k.in_flight for k in keys])
    found: dict[Flow, float] = defaultdict(float)
    if not total:
        return found
    for k in keys:
        found[k.flow, k.priority] += (k.waiting + k.in_flight) / total / k.weight
    return found


def _devices_taken(state: ClusterState, i: Instance) -> float:
    """Return the devices that an instance takes, in parts of their memory."""
    nbytes = per_device_bytes(i, i.reserve_bytes)
    bookings = [state.bookings.get(device_key(i.node, device)) for device in i.device_ids]
    return sum([min(1.0, nbytes / b.budget_bytes) if b is not None and b.budget_bytes else 1.0 for b in bookings])


def _forget_idle(tx: Transaction) -> None:
    waiting = {f for demand in tx.state.demand.values() for f in _flows(demand)}
    idle = sorted((s.tag_s, key) for key, s in tx.state.key_shares.items() if (s.flow, s.priority) not in waiting)
    for _, key in idle[: len(idle) // 2]:
        tx.drop(KeyShare, key)
