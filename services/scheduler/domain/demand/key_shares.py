"""Fair shares of the API keys whose models wait for a device (ADR 0096).

Start-time fair queueing over predicted device-seconds: a start is charged to the keys whose
requests wait for the model, in proportion to their number, divided by their weights. A key's tag is
what it was charged. Waiting models of the key with the smallest tag are placed first.

A key that begins to wait has at least the smallest tag that a waiting key had before its last
start: idle time gives no credit, and its first model goes first. Shares hold among requests of one
priority. Prewarming and `replicas.min` are charged to no key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import KeyShare, ModelDemand, share_key
from services.scheduler.domain.values import value
from shared.contracts.demand import KeyDemand

NO_KEY = (KeyDemand(waiting=1),)
"""Requests of gateways that do not report keys, and wakes."""
MAX_SHARES = 1024
"""Of more tags, the smallest ones of keys without waiting requests are forgotten."""


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
    keys = (demand.keys if demand is not None else ()) or NO_KEY
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
    new = _flows(tx.state.demand.get(model)) - _flows(before)
    for flow, priority in sorted(new - {f for d in _others(tx.state, model) if new for f in _flows(d)}):
        waiting = {f for d in tx.state.demand.values() for f in _flows(d)} - new
        shares = [tx.state.key_shares.get(share_key(f, p)) for f, p in waiting if p == priority]
        floor = min([share.start_s if share is not None else 0.0 for share in shares], default=0.0)
        if floor > _tag(tx.state, flow, priority):
            tx.put(KeyShare(flow, priority, floor, floor))


def _others(state: ClusterState, model: str) -> Iterator[ModelDemand]:
    return (demand for name, demand in state.demand.items() if name != model)


def _flows(demand: ModelDemand | None) -> set[tuple[str, int]]:
    """Return the keys whose requests wait for a model, with their priorities."""
    return {(k.flow, k.priority) for k in demand.keys or NO_KEY} if demand is not None and demand.waiting else set()


def charge_start(tx: Transaction, model: str, device_s: float) -> None:
    """Charge a start to the keys whose requests wait for the model.

    Args:
        tx: The decision's transaction.
        model: The model.
        device_s: Predicted device-seconds of the start.
    """
    demand = tx.state.demand.get(model)
    if demand is None or not demand.waiting:
        return
    keys = demand.keys or NO_KEY
    total = sum([k.waiting for k in keys])
    charged: dict[tuple[str, int], float] = defaultdict(float)
    for k in keys:
        charged[k.flow, k.priority] += device_s * k.waiting / total / k.weight
    for (flow, priority), seconds in charged.items():
        start = _tag(tx.state, flow, priority)
        tx.put(KeyShare(flow, priority, start + seconds, start))
    if len(tx.state.key_shares) > MAX_SHARES:
        _forget_idle(tx)


def _forget_idle(tx: Transaction) -> None:
    waiting = {f for demand in tx.state.demand.values() for f in _flows(demand)}
    idle = sorted((s.tag_s, key) for key, s in tx.state.key_shares.items() if (s.flow, s.priority) not in waiting)
    for _, key in idle[: len(idle) // 2]:
        tx.drop(KeyShare, key)
