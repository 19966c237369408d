"""Fair shares of the API keys whose models compete for devices (ADR 0096).

Start-time fair queueing over device-seconds. A key's tag is what it was charged:

1. A start is charged with its predicted seconds to the keys whose requests wait for the model, in
   proportion to their number.
2. While any model waits for room, a serving instance is charged to the keys whose requests used
   its model when some waited for it last.

Both count in proportion to the memory that the instance takes of its devices, and are divided by
the key's weight. Waiting models of the key with the smallest tag are placed first, and serving
models of a key that is far enough ahead give way (`may_interrupt`).

A key that begins to wait starts at the smallest tag that a waiting key had before its last start,
or `TURN_S` ago: idle time gives no credit, and its first model goes first. Shares hold among
requests of one priority. Prewarming, wakes and `replicas.min` are charged to no key.
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

NO_KEY = (KeyDemand(waiting=1),)
"""Requests of gateways that do not report keys, and wakes."""
TURN_S = 2.0
"""A key that is this many device-seconds ahead gives way to another one, if starts cost nothing."""
RESTARTS = 4.0
"""A key keeps an instance for so many times as long as it takes to have it back."""
MAX_SHARES = 1024
"""Of more tags, the smallest ones of keys without waiting requests are forgotten."""
_LONGEST_S = 1.0
"""At most this much time is charged at once: the scheduler may have paused."""


@value(frozen=True, slots=True)
class Standing:
    """Where a waiting model stands among the keys.

    Attributes:
        priority: The highest priority of its waiting requests.
        tag_s: The smallest tag of the keys with requests of that priority.
    """

    priority: int
    tag_s: float


def standing_of(state: ClusterState, model: str) -> Standing:
    """Return the standing of a model whose requests wait."""
    demand = state.demand.get(model)
    keys = [k for k in demand.keys if k.waiting] if demand is not None else []
    keys = keys or list(NO_KEY)
    priority = max([k.priority for k in keys])
    return Standing(priority, min([_tag(state, k.flow, k.priority) for k in keys if k.priority == priority]))


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


def _flows(demand: ModelDemand | None) -> set[tuple[str, int]]:
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


def charge_serving(tx: Transaction) -> None:
    """Charge the time since the last call to the keys of serving instances, if any model waits."""
    clock = tx.state.share_clock.get("")
    if not tx.state.unschedulable:
        if clock is not None:
            tx.drop(ShareClock, "")
        return
    tx.put(ShareClock(tx.now))
    elapsed = min(tx.now - clock.at, _LONGEST_S) if clock is not None else 0.0
    if elapsed <= 0:
        return
    charged: dict[tuple[str, int], float] = defaultdict(float)
    for report in tx.state.reports.values():
        users = tx.state.model_users.get(report.status.model)
        i = tx.state.instances.get(report.instance_id)
        if users is None or i is None or report.idle_since is not None or i.state is not InstanceState.READY:
            continue
        for flow, part in _parts(users.keys).items():
            charged[flow] += elapsed * _devices_taken(tx.state, i) * part
    for flow, seconds in sorted(charged.items()):
        share = tx.state.key_shares.get(share_key(*flow)) or KeyShare(*flow, 0.0)
        tag_s = share.tag_s + seconds
        tx.put(KeyShare(*flow, tag_s, max(share.start_s, tag_s - TURN_S)))


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
    if users is None:
        return False
    priority = max([k.priority for k in users.keys])
    if waiting.priority != priority:
        return waiting.priority > priority
    received = min([_tag(state, k.flow, k.priority) for k in users.keys if k.priority == priority])
    return received - waiting.tag_s >= TURN_S + RESTARTS * reload_s


def _parts(keys: Sequence[KeyDemand]) -> dict[tuple[str, int], float]:
    """Return what each key and priority pays of a device-second, divided by the key's weight."""
    total = sum([k.waiting + k.in_flight for k in keys])
    found: dict[tuple[str, int], float] = defaultdict(float)
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
