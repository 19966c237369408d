"""Parking: start, warm and suspend models with `park` before their first request.

Level-triggered: a model that is to be parked and has no instance gets one, if

1. no request waits and nothing is being started for a request;
2. fewer than `park_concurrency` such starts run on the node;
3. the node can suspend it, and has free memory for it and for its snapshot: nothing is evicted;
4. parking has not failed `park_max_attempts` times, nor been found impossible.

Models go by priority, then the smallest first. A ready instance is then suspended
(lifecycle/scale_down.py). A start for parking is the first victim when another model needs memory,
and becomes an ordinary start with the first request for its model. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.domain.estimates.memory_needs import device_count, start_bytes
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.formatting import gib
from services.scheduler.domain.lifecycle.park_attempts import TRIGGER, is_parking
from services.scheduler.domain.lifecycle.transitions import start_instance
from services.scheduler.domain.placement.constraints import Excludes, placement_rule
from services.scheduler.domain.placement.place import Placement
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace, value
from shared.contracts.admin import ParkView
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, NodeStatus
from shared.contracts.plans import Candidate


@value(frozen=True, slots=True)
class FreeDevice:
    """A device for parking.

    Attributes:
        booking: Its memory.
        status: Its node's report.
        kind: Kind of the device.
        snapshots: Bytes that are free for snapshots on the node.
        starts: Starts for parking that the node still accepts.
    """

    booking: Booking
    status: NodeStatus
    kind: str
    snapshots: int
    starts: int


FreeDevices = tuple[FreeDevice, ...]
"""Devices of one node for one engine."""


def start_parking(tx: Transaction, names: Iterable[str]) -> None:
    """Start parking the models of these names that can be parked now."""
    waiting = [m for n in names if n in tx.state.to_park and (m := tx.state.models.get(n)) and not _held_back(tx.state, m, tx.now)]
    if not waiting or requests_have_priority(tx.state, tx.now, tx.policy):
        return
    rooms = find_free_devices(tx.state, tx.now, tx.policy)
    for model in sorted(waiting, key=lambda m: (-m.card.spec.priority, start_bytes(tx.state, m.card), m.key)):
        if not rooms:
            return
        placement = _place_parked(tx, model, rooms)
        if placement is not None:
            start_instance(tx, model, placement, TRIGGER, tx.now)
            rooms = find_free_devices(tx.state, tx.now, tx.policy)


def _place_parked(tx: Transaction, model: Model, rooms: list[FreeDevice]) -> Placement | None:
    need = start_bytes(tx.state, model.card)
    failure_history = tx.state.failures.get(model.key)
    avoid = failure_history.failed_devices if failure_history else ()
    excludes = placement_rule(tx.state, model)
    devices = device_count(model.card)
    fitting = [s for s in device_sets_of(rooms, devices) if not park_obstacle(s, model.card, need, excludes)]
    if not fitting:
        return None
    forecast = Forecast(tx.state, model.card, tx.now)
    times = {s[0].booking.key: forecast.predict(s[0].booking, leaving=False) for s in fitting}

    def rank(together: FreeDevices) -> tuple[bool, float, int, str]:
        first = together[0].booking.key
        return any(r.booking.key in avoid for r in together), times[first].ms, -min(r.booking.free_bytes for r in together), first

    best = min(fitting, key=rank)
    prediction = times[best[0].booking.key]
    chosen = Candidate(
        node=best[0].booking.node,
        device_ids=tuple(r.booking.device_id for r in best),
        way="load",
        predicted=prediction.phases,
        predicted_ms=prediction.ms,
        needed_bytes=-(-need // devices),
        free_bytes=min(r.booking.free_bytes for r in best),
        source=prediction.source,
        resident_bytes=prediction.resident_bytes,
        spread_ms=prediction.cost.spread_s * 1e3,
        queued_ms=prediction.queued_ms,
    )
    return Placement("load", f"parked before its first request: {_names(best)} has room", (chosen,), chosen)


def device_sets_of(rooms: list[FreeDevice], devices: int) -> list[FreeDevices]:
    """Return the device sets for an engine: single devices, or each node's freest of one kind."""
    if devices == 1:
        return [(r,) for r in rooms]
    alike: dict[tuple[str, str], list[FreeDevice]] = {}
    for r in rooms:
        alike.setdefault((r.booking.node, r.kind), []).append(r)
    most = [sorted(there, key=lambda r: (-r.booking.free_bytes, r.booking.key))[:devices] for there in alike.values()]
    return [
        tuple(sorted(found, key=lambda r: (len(r.booking.device_id), r.booking.device_id)))
        for found in most
        if len(found) == devices
    ]


def requests_have_priority(state: ClusterState, now: float, policy: Policy) -> str:
    """Return why nothing is started for parking now; empty: something may be."""
    if now - state.recovered_at < policy.demand_grace_s:
        return "the scheduler has just started"
    if any(m.waiting for m in state.demand.values()) or any(w.kind == "wake" for w in state.waiters.values()):
        return "requests have priority"
    if any(i.state.starting and i.trigger != TRIGGER for i in state.instances.values()):
        return "starts for waiting requests have priority"
    return ""


def find_free_devices(state: ClusterState, now: float, policy: Policy) -> list[FreeDevice]:
    """Return the devices where something may be started now."""
    found = []
    starting: dict[str, list[Instance]] = {}
    for i in state.instances.values():
        if is_parking(i):
            starting.setdefault(i.node, []).append(i)
    for b in state.bookings.values():
        presence = state.presence.get(b.node)
        status = presence.status if presence else None
        pause = state.cooldowns.get(b.key)
        busy = starting.get(b.node, [])
        if status is None or b.closed_reason or (pause is not None and pause.until > now) or len(busy) >= policy.park_concurrency:
            continue
        kind = next((x.kind for x in status.devices if x.device_id == b.device_id), "")
        snapshots = status.snapshot_budget_bytes - status.snapshot_bytes - sum(i.reserve_bytes for i in busy)
        found.append(FreeDevice(b, status, kind, snapshots, policy.park_concurrency - len(busy)))
    return found


def park_obstacle(rooms: FreeDevices, card: ModelCard, need: int, excludes: Excludes | None) -> str:
    """Return why the model is not parked on these devices; empty: it can be.

    Args:
        need: Bytes on all of them together.
    """
    each = -(-need // len(rooms))
    for r in rooms:
        at = r.booking.key
        if excludes is not None and (why := excludes(r.booking)):
            return f"{at}: {why}"
        if why := suspend_obstacle(r.status, r.kind, card):
            return f"{at}: {why}"
        if each > r.booking.free_bytes:
            return f"{at}: needs {gib(each)}, {gib(max(0, r.booking.free_bytes))} free"
    if need > rooms[0].snapshots:
        return f"{_names(rooms)}: needs {gib(need)} for its snapshot, {gib(max(0, rooms[0].snapshots))} free (THAW_SNAPSHOT_BYTES)"
    return ""


def _names(rooms: FreeDevices) -> str:
    return " and ".join(r.booking.key for r in rooms)


def suspend_obstacle(status: NodeStatus, kind: str, card: ModelCard) -> str:
    """Return why a node cannot suspend the engine on a device of that kind; empty: it can."""
    ways = {c.name: c for c in status.capabilities}
    own = ways.get("suspend:sleep")
    if own is not None and own.available and card.capabilities.sleep_levels and (kind == "cuda" or card.spec.engine == "ollama"):
        return ""
    if not card.capabilities.snapshot:
        return f"engine {card.spec.engine} cannot be suspended"
    way = ways.get(f"suspend:{kind}")
    if way is None:
        return f"its node suspends nothing on {kind} (THAW_SUSPEND)"
    return "" if way.available else f"it cannot suspend: {way.reason}"


def _held_back(state: ClusterState, model: Model, now: float) -> bool:
    failure_history = state.park_failures.get(model.key)
    return failure_history is not None and (bool(failure_history.final) or failure_history.not_before > now)


def promote_parked_starts(tx: Transaction, names: Iterable[str]) -> None:
    """Turn starts for parking into ordinary starts if requests wait for them."""
    for name in names:
        if tx.state.waiting_count(name):
            for i in tx.state.of_model(name):
                if i.trigger == TRIGGER:
                    tx.put(replace(i, trigger="demand"))


def park_view(state: ClusterState, model: Model, now: float, policy: Policy) -> ParkView | None:
    """Return the parking state of a model; None if it is not to be parked."""
    if not model.card.spec.park or model.card.spec.base is not None:
        return None
    there = [i for i in state.of_model(model.key) if i.generation == model.card.generation]
    if any(i.state.parked for i in there):
        return ParkView(state="parked")
    if any(not is_parking(i) for i in there):
        up = any(i.state is InstanceState.READY for i in there)
        return ParkView(state="up" if up else "queued", reason="" if up else "it is starting or stopping")
    if there:
        return ParkView(state="starting" if there[0].state.starting else "suspending")
    failure_history = state.park_failures.get(model.key)
    if failure_history is not None and failure_history.final:
        return ParkView(state=failure_history.final, reason=failure_history.reason)
    if failure_history is not None and failure_history.not_before > now:
        return ParkView(state="queued", reason=f"once more in {failure_history.not_before - now:.0f} s: {failure_history.reason}")
    return _waits(state, model, now, policy)


def _waits(state: ClusterState, model: Model, now: float, policy: Policy) -> ParkView:
    """Return what the model waits for, or that no node can suspend it."""
    devices = [(n, x) for n, p in sorted(state.presence.items()) if p.alive and p.status for x in p.status.devices]
    against = [(f"{n}/{x.device_id}", suspend_obstacle(state.presence[n].status, x.kind, model.card)) for n, x in devices]  # type: ignore[arg-type]  # those with a status
    if against and all(why for _, why in against):
        return ParkView(state="impossible", reason="; ".join(dict.fromkeys(f"{at}: {why}" for at, why in against)))
    if first := requests_have_priority(state, now, policy):
        return ParkView(state="queued", reason=first)
    rooms, need = find_free_devices(state, now, policy), start_bytes(state, model.card)
    if any(is_parking(i) for i in state.instances.values()):
        return ParkView(state="queued", reason="other models are being parked")
    excludes, count = placement_rule(state, model), device_count(model.card)
    sets = device_sets_of(rooms, count)
    reasons = [park_obstacle(s, model.card, need, excludes) for s in sets]
    if rooms and not sets:
        return ParkView(state="waiting", reason=f"no node has {count} devices that may be used now")
    if sets and all(reasons):
        return ParkView(state="waiting", reason="; ".join(reasons))
    return ParkView(state="queued", reason="" if rooms else "no node accepts starts now")
