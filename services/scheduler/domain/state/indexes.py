"""Indexes beside the tables, maintained by `apply`. Values are replaced, never mutated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from services.scheduler.domain.cost.links import busy_until, find_remote_bandwidth
from services.scheduler.domain.policies.port import Keep
from services.scheduler.domain.state.accounting import compute_booking, is_drained, rounded_speed
from services.scheduler.domain.state.booking import device_key
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import MIGRATE, Entity, Instance, Model, Node
from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate
from services.scheduler.domain.state.volatile import Fetch, InstanceReport, LaterStage, LoaderPresence, Presence, expectation_group
from shared.contracts.node import InstanceState
from shared.unit_charges import shared_units

_AT_ONCE = float("-inf")
Groups = MutableMapping[str, tuple[str, ...]]


def index(state: ClusterState, old: Entity | None, new: Entity | None) -> None:
    """Update the indexes after `old` was replaced by `new`; None: absent."""
    keep = _KEEPERS.get(type(new if new is not None else old))
    if keep is not None:
        keep(state, old, new)


def _index_report(state: ClusterState, old: InstanceReport | None, new: InstanceReport | None) -> None:
    present = new or old
    assert present is not None
    _regroup(state, "by_template", _find_template_keys(old), _find_template_keys(new), present.instance_id)
    i = state.instances.get(present.instance_id)
    if i is not None and _counts(old) != _counts(new):
        _rebook(state, i.node, i.device_ids)
        _rebook_stages(state, i.instance_id)
        update_due_time(state, i)


def _presence(state: ClusterState, old: Presence | None, new: Presence | None) -> None:
    present = new or old
    assert present is not None
    if _offers(old) != _offers(new):
        _rebook_node(state, present.node)


def _estimate(state: ClusterState, old: Estimate | None, new: Estimate | None) -> None:
    present = new or old
    assert present is not None
    if present.model and present.node != ANYWHERE:
        _regroup(state, "measured_on", {present.model} if old else (), {present.model} if new else (), present.node)


def _find_template_keys(report: InstanceReport | None) -> tuple[str, ...]:
    return (report.status.template_key,) if report is not None and report.status.template_key else ()


def _counts(report: InstanceReport | None) -> tuple[object, ...]:
    """Return the part of a report that a booking depends on."""
    if report is None:
        return ()
    status = report.status
    kept = status.memory.reserved if status.state.parked else None
    possible = (status.suspension.possible, status.suspension.assessed)
    return (status.state, report.idle_since, kept, possible, status.suspension.left_bytes, is_drained(report), report.is_stuck)


def with_keep_alive(state: ClusterState, keep: Keep) -> ClusterState:
    """Set the keep-alive rule of `state` and recompute due times."""
    state.keep_alive_rule = keep
    for i in state.instances.values():
        update_due_time(state, i)
    return state


def update_due_time(state: ClusterState, i: Instance) -> None:
    """Store when the instance is due (lifecycle/scale_down.py, lifecycle/node_status.py).

    Never too late; a time too early only costs one more examination.
    """
    due, known = _find_due_at(state, i), state.deadlines.get(i.instance_id)
    if due == known:
        return
    if due is None:
        state.get_writable("deadlines").pop(i.instance_id, None)
    else:
        state.get_writable("deadlines")[i.instance_id] = due


def _find_due_at(state: ClusterState, i: Instance) -> float | None:
    if i.leaving != "no":
        return None
    report, model, node = state.reports.get(i.instance_id), state.models.get(i.model), state.nodes.get(i.node)
    current = model is not None and i.generation == model.card.generation
    node_drained = node is None or node.drain_since is not None
    if not current or node_drained or report is None or report.status.state.starting or model is None:
        return _AT_ONCE
    if i.state.parked:
        return None
    if i.state is not InstanceState.READY or i.trigger == "park":
        return _AT_ONCE
    if _may_be_surplus(state, i, model, report):
        return _AT_ONCE
    spec = model.card.spec
    if report.idle_since is None or spec.pin or (kept := state.keep_alive_s(i, model)) < 0:
        return None
    return max(report.idle_since, i.ready_at or report.idle_since) + kept


def _may_be_surplus(state: ClusterState, i: Instance, model: Model, report: InstanceReport) -> bool:
    """True for an idle destination of a migration, of a model beyond `replicas.max`."""
    is_idle = i.trigger == MIGRATE and report.idle_since is not None
    return is_idle and len(state.live_instances(model)) > model.card.spec.replicas.max


def _offers(presence: Presence | None) -> tuple[object, ...]:
    status = presence.status if presence else None
    return (presence.alive, status.stopping, status.devices, presence.stuck) if presence and status else ()


def _regroup(state: ClusterState, name: str, old: Iterable[str], new: Iterable[str], member: str) -> None:
    """Move `member` from the `old` groups of the index to the `new` ones."""
    before, after = set(old), set(new)
    if before == after:
        return
    groups: Groups = state.get_writable(name)
    for group in before - after:
        left = tuple(m for m in groups.get(group, ()) if m != member)
        if left:
            groups[group] = left
        else:
            groups.pop(group, None)
    for group in after - before:
        groups[group] = (*groups.get(group, ()), member)


def _join(state: ClusterState, name: str, group: str, member: str) -> None:
    groups: Groups = state.get_writable(name)
    groups[group] = (*groups.get(group, ()), member)


def _instance(state: ClusterState, old: Instance | None, new: Instance | None) -> None:
    present = new or old
    assert present is not None
    if old is None or new is None or (old.node, old.device_ids, old.model) != (new.node, new.device_ids, new.model):
        key = present.instance_id
        if old is None:
            _join(state, "by_model", present.model, key)
            _join(state, "by_node", present.node, key)
            for device in _devices(present):
                _join(state, "by_device", device, key)
            _park(state, present.model)
        else:
            _regroup(state, "by_model", [old.model], [new.model] if new else (), key)
            _regroup(state, "by_node", [old.node], [new.node] if new else (), key)
            _regroup(state, "by_device", _devices(old), _devices(new), key)
            for model in {old.model, present.model}:
                _park(state, model)
    if old is not None:
        _rebook(state, old.node, old.device_ids)
    _rebook_stages(state, present.instance_id)
    before, after = _pending_load(old), _pending_load(new)
    if before != after:
        _regroup(state, "loading_on", [present.node] if before else (), [present.node] if after else (), present.instance_id)
        _update_link_queue(state, present.node)
    if new is None:
        _forget(state, "deadlines", present.instance_id)
    else:
        update_due_time(state, new)
    if new is not None and (old is None or old.device_ids != new.device_ids or old.node != new.node):
        _rebook(state, new.node, new.device_ids)


def _later_stage(state: ClusterState, old: LaterStage | None, new: LaterStage | None) -> None:
    present = new or old
    assert present is not None
    device = device_key(present.node, present.device_id)
    _regroup(state, "stages_on", [device] if old else (), [device] if new else (), present.stage_id)
    _regroup(state, "stages_of", [present.first] if old else (), [present.first] if new else (), present.stage_id)
    _rebook(state, present.node, [present.device_id])


def _full_worker(state: ClusterState, old: FullWorker | None, new: FullWorker | None) -> None:
    present = new or old
    assert present is not None
    _regroup(state, "promised_on", [present.device] if old else (), [present.device] if new else (), present.key)
    _rebook(state, present.node, [present.device_id])


def _fetch(state: ClusterState, old: Fetch | None, new: Fetch | None) -> None:
    present = new or old
    assert present is not None
    _regroup(state, "fetches_on", [old.node] if old else (), [new.node] if new else (), present.holder)


def _devices(i: Instance | None) -> list[str]:
    return [device_key(i.node, device) for device in i.device_ids] if i else []


def _node(state: ClusterState, old: Node | None, new: Node | None) -> None:
    present = new or old
    assert present is not None
    name = present.name
    gone = {d.device_id for d in old.devices} if old else set()
    gone -= {d.device_id for d in new.devices} if new else set()
    for device in gone:
        _forget(state, "bookings", device_key(name, device))
    _rebook_node(state, name)
    if old is None or new is None or old.drain_since != new.drain_since:
        for i in state.on_node(name):
            update_due_time(state, i)


def _loader(state: ClusterState, old: LoaderPresence | None, new: LoaderPresence | None) -> None:
    present = new or old
    assert present is not None
    _regroup(state, "in_memory", old.in_memory if old else (), new.in_memory if new else (), present.node)
    _regroup(state, "on_disk", old.on_disk if old else (), new.on_disk if new else (), present.node)
    _regroup(state, "has_units", old.on_devices if old else (), new.on_devices if new else (), present.node)
    _regroup(state, "expecting", _expects(old), _expects(new), present.node)
    _update_link_queue(state, present.node)
    if _speed(old) != _speed(new) or _units(old) != _units(new):
        _rebook_node(state, present.node)


def _expects(loader: LoaderPresence | None) -> tuple[str, ...]:
    return (expectation_group(loader.node),) if loader is not None and loader.status.memory else ()


def _update_link_queue(state: ClusterState, node: str) -> None:
    """Store when the queue of the node's links will be empty (cost/links.py)."""
    loader = state.loaders.get(node)
    reported_at = loader.last_message_at if loader is not None else 0.0
    there = [state.instances[i] for i in state.loading_on.get(node, ())]
    decided = [
        load for i in there if (load := _pending_load(i)) is not None and load[0] > reported_at and not _is_resident(state, i)
    ]
    until = busy_until(reported_at, loader.status if loader is not None else None, decided)
    if until <= 0.0:
        _forget(state, "links_busy_until", node)
    elif state.links_busy_until.get(node) != until:
        state.get_writable("links_busy_until")[node] = until


def _pending_load(i: Instance | None) -> tuple[float, int] | None:
    """Return when a load was decided and its bytes; None: the instance loads nothing."""
    if i is None or not i.state.starting or i.state is InstanceState.RESUMING:
        return None
    return i.planned_at, max(0, i.reserve_bytes - i.kv_bytes)


def _is_resident(state: ClusterState, i: Instance) -> bool:
    return i.node in state.in_memory.get(i.revision, ())


def _speed(loader: LoaderPresence | None) -> tuple[float | None, float | None]:
    return (
        (rounded_speed(loader.status.bytes_per_second), rounded_speed(find_remote_bandwidth(loader.status)))
        if loader
        else (None, None)
    )


def _units(loader: LoaderPresence | None) -> tuple[object, ...]:
    """Return the part of a report that the charge for shared weights depends on."""
    return tuple([(m.device_id, shared_units(m)) for m in loader.status.memory]) if loader else ()


def _model(state: ClusterState, old: Model | None, new: Model | None) -> None:
    if old is not None:
        for alias in old.card.spec.aliases:
            if state.aliases.get(alias) == old.key:  # another model may have got it in the same command
                _forget(state, "aliases", alias)
        _forget(state, "kept_running", old.key)
        _forget(state, "anti_affine", old.key)
    if new is not None:
        if new.card.spec.aliases:
            state.get_writable("aliases").update(dict.fromkeys(new.card.spec.aliases, new.key))
        if new.card.spec.replicas.min > 0 and new.card.spec.base is None:
            state.get_writable("kept_running")[new.key] = True
        if new.card.spec.placement.anti_affinity:
            state.get_writable("anti_affine")[new.key] = True
    _park(state, (new or old).key)  # type: ignore[union-attr]  # one of them is there
    if (old is not None and old.card.spec.pin) != (new is not None and new.card.spec.pin):
        for i in state.of_model((new or old).key):  # type: ignore[union-attr]  # one of them is there
            _rebook(state, i.node, i.device_ids)
            _rebook_stages(state, i.instance_id)
    for i in state.of_model((new or old).key):  # type: ignore[union-attr]  # one of them is there
        update_due_time(state, i)


def _park(state: ClusterState, name: str) -> None:
    model = state.models.get(name)
    if model is not None and model.card.spec.park and model.card.spec.base is None and not state.by_model.get(name):
        state.get_writable("to_park")[name] = True
    elif state.to_park:
        _forget(state, "to_park", name)


def _forget(state: ClusterState, name: str, key: str) -> None:
    """Remove `key` from the index of that name."""
    if state.__dict__[name].get(key) is not None:
        state.get_writable(name).pop(key)


def _rebook_node(state: ClusterState, name: str) -> None:
    if (node := state.nodes.get(name)) is not None:
        _rebook(state, name, [d.device_id for d in node.devices])


def _rebook(state: ClusterState, node: str, device_ids: Iterable[str]) -> None:
    found = state.nodes.get(node)
    if found is None:  # its devices are computed when it is known
        for device in device_ids:
            _forget(state, "claimed", device_key(node, device))
        return
    for device in device_ids:
        booked = compute_booking(state, node, device)
        key = booked.key
        if state.bookings.get(key) != booked and _has(found, device):
            state.get_writable("bookings")[key] = booked
        if booked.claimed_bytes > booked.promised_bytes:
            if key not in state.claimed:
                state.get_writable("claimed")[key] = (node, device)
        else:
            _forget(state, "claimed", key)


def _rebook_stages(state: ClusterState, first: str) -> None:
    """Book the devices of a group's later stages again: their bytes leave with the first stage."""
    for stage_id in state.stages_of.get(first, ()):
        stage = state.later_stages[stage_id]
        _rebook(state, stage.node, [stage.device_id])


def _has(node: Node, device_id: str) -> bool:
    return any(d.device_id == device_id for d in node.devices)


_KEEPERS: dict[type[Any], Callable[[ClusterState, Any, Any], None]] = {
    Instance: _instance,
    InstanceReport: _index_report,
    LaterStage: _later_stage,
    FullWorker: _full_worker,
    Fetch: _fetch,
    Presence: _presence,
    Node: _node,
    LoaderPresence: _loader,
    Model: _model,
    Estimate: _estimate,
}
"""Index updates by kind of entity; the other kinds have no index."""
