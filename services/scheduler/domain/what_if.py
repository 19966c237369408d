"""Decide for a changed copy of the cluster, without changing the cluster.

The model's own demand is used; without any, one request is assumed. All waiting models are placed
by the same decision in the usual order, so that another model may take the added room. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.decide import decide
from services.scheduler.domain.events import Tick
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.placement.place import place
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Change, Drop, Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Device, Instance, Model, Node
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import GatewayDemand, LoaderPresence, ModelDemand, Presence, Unschedulable
from services.scheduler.domain.values import replace, value
from shared.contracts.admin import AssumeBudget, AssumeNode, AssumeNoNode, Assumption, QueuePlace
from shared.contracts.node import DeviceStatus, NodeStatus
from shared.contracts.plans import PlanRecord
from shared.errors import Conflict, NotFound

WHAT_IF_ID = "what-if"
_SHOWN = 10


@value(frozen=True, slots=True)
class WhatIfResult:
    """The decision under the assumptions.

    Attributes:
        plan: The plan of the model.
        assumed: The assumptions as text.
        others: Plans of other models that would start with it.
        runs_already: Nothing would start: the plan is that of one more instance.
    """

    plan: PlanRecord
    assumed: tuple[str, ...]
    others: tuple[PlanRecord, ...]
    runs_already: bool = False


def evaluate_what_if(
    state: ClusterState, model: Model, assumptions: Iterable[Assumption], now: float, policy: Policy
) -> WhatIfResult:
    """Decide for `model` under `assumptions`.

    Raises:
        NotFound: An assumption names an unknown node or device.
        Conflict: An assumption adds a node that exists.
    """
    above = state.overlay()
    assumed = []
    for assumption in assumptions:
        changes, words = _changes(above, assumption, now)
        apply(above, changes)
        assumed.append(words)
    if running := above.live_instances(model):
        return WhatIfResult(_one_more(above, model, running, now, policy), tuple(assumed), (), True)
    if not above.waiting_count(model.key):
        asked = GatewayDemand(WHAT_IF_ID, 1, 0, now, now)
        apply(above, [Put(ModelDemand(model.key, (asked,)))])
    decision = decide(above, Tick(now, connected_since=None), now, policy)
    after = decision.overlay
    plan = after.last_plan_of(model.key) or PlanRecord(
        plan_id=WHAT_IF_ID, model=model.key, created=now, trigger=WHAT_IF_ID, way="wait"
    )
    others = tuple(p for p in decision.plans if p.model != model.key)
    return WhatIfResult(plan.model_copy(update={"trigger": WHAT_IF_ID}), tuple(assumed), others)


def _one_more(state: ClusterState, model: Model, running: list[Instance], now: float, policy: Policy) -> PlanRecord:
    """Return where one more instance of a running model would go."""
    placement = place(Transaction(state, now, policy), model, 0.0)
    there = ", ".join(f"{i.instance_id} on {i.node}" for i in running)
    return PlanRecord(
        plan_id=WHAT_IF_ID,
        model=model.key,
        created=now,
        trigger=WHAT_IF_ID,
        way=placement.way,
        chosen=placement.chosen,
        candidates=placement.candidates,
        reason=f"it already runs ({there}), so nothing would start; one more: {placement.reason}",
    )


def _changes(state: ClusterState, assumption: Assumption, now: float) -> tuple[list[Change], str]:
    match assumption:
        case AssumeNode():
            return _add_node(state, assumption, now)
        case AssumeBudget():
            return _budget(state, assumption)
        case AssumeNoNode(node=node):
            found = _node(state, node)
            gone: list[Change] = [Drop(Instance, i.instance_id) for i in state.on_node(node)]
            return [*gone, Drop(Presence, node), Drop(LoaderPresence, node), Drop(Node, found.name)], f"node {node} is gone"


def _add_node(state: ClusterState, a: AssumeNode, now: float) -> tuple[list[Change], str]:
    if a.node in state.nodes:
        raise Conflict(f"Node {a.node!r} already exists. To change it, write budget={a.node}/DEVICE:BYTES", param="what_if")
    like = next((n for _, n in sorted(state.nodes.items()) if n.devices), None)
    if like is None and (a.devices is None or a.nbytes is None):
        raise NotFound("No node exists to copy. Write add-node=NAME:DEVICES:BYTES", param="what_if")
    kind = like.devices[0].kind if like is not None else "cuda"
    budget = a.nbytes if a.nbytes is not None else like.devices[0].budget_bytes if like is not None else 0
    count = a.devices if a.devices is not None else len(like.devices) if like is not None else 1
    devices = tuple(Device(f"{kind}:{n}", kind, "", budget) for n in range(count))
    status = NodeStatus(
        node=a.node,
        boot_id=WHAT_IF_ID,
        seq=2,
        devices=tuple(DeviceStatus(device_id=d.device_id, kind=kind, budget_bytes=budget, reserved_bytes=0) for d in devices),
    )
    changes: list[Change] = [Put(Node(a.node, WHAT_IF_ID, {}, devices)), Put(Presence(a.node, now, True, status))]
    if like is not None and (loader := state.loaders.get(like.name)) is not None:
        empty = loader.status.model_copy(update={"node": a.node, "segments": (), "cached": (), "links": ()})
        changes.append(Put(LoaderPresence(a.node, now, empty)))
    return changes, f"node {a.node} is there, with {count} x {kind} of {gib(budget)}, empty"


def _budget(state: ClusterState, a: AssumeBudget) -> tuple[list[Change], str]:
    node = _node(state, a.node)
    known = [d.device_id for d in node.devices]
    if a.device not in known:
        raise NotFound(f"Node {a.node} has no device {a.device!r}; it has {', '.join(known)}", param="what_if")
    devices = tuple(replace(d, budget_bytes=a.nbytes) if d.device_id == a.device else d for d in node.devices)
    return [Put(replace(node, devices=devices))], f"{a.node}/{a.device} has a budget of {gib(a.nbytes)}"


def _node(state: ClusterState, name: str) -> Node:
    found = state.nodes.get(name)
    if found is None:
        raise NotFound(f"No node {name!r}; see `thaw node list`", param="what_if")
    return found


def queue_position(state: ClusterState, model: Model, now: float) -> QueuePlace | None:
    """Return the model's position in the queue; None: it does not wait."""
    mine = state.unschedulable.get(model.key)
    if mine is None:
        return None

    def order(u: Unschedulable) -> tuple[int, float, str]:
        owner = state.models.get(u.model)
        return (-owner.card.spec.priority if owner is not None else 0, u.since, u.model)

    queue = [u.model for u in sorted(state.unschedulable.values(), key=order)]
    at = queue.index(model.key)
    return QueuePlace(
        position=at + 1,
        length=len(queue),
        waiting=state.waiting_count(model.key),
        since_ms=max(0.0, now - mine.since) * 1e3,
        reason=mine.reason,
        before=tuple(queue[max(0, at - _SHOWN) : at]),
    )
