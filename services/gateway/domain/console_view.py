"""The contents of the console's pages as flat records, and the difference of two such views.

A view has sections (models, nodes, devices, instances, pulls); a section has one record for each
id. A change of one record is sent as this record; everything else stays as the page has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shared.contracts.active_requests import RequestsViewed
from shared.contracts.admin import ClusterView, LoaderView, ModelView, NodeView, PullView
from shared.contracts.loader import DeviceMemory
from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus
from shared.contracts.traces import RequestTrace

Record = dict[str, Any]
View = dict[str, dict[str, Record]]
Difference = dict[str, dict[str, Record | None]]

_STATES = ("ready", "draining", "resuming", "loading", "preparing", "asleep", "suspended")
"""States of instances in the order in which they decide the state of a model, as in `thaw ps`."""


def difference(before: View, after: View) -> Difference:
    """Return the records of `after` that are new or changed, and None for those that are gone."""
    found: Difference = {}
    for section in before.keys() | after.keys():
        old, new = before.get(section, {}), after.get(section, {})
        changed: dict[str, Record | None] = {key: record for key, record in new.items() if old.get(key) != record}
        changed.update(dict.fromkeys(old.keys() - new.keys()))
        if changed:
            found[section] = changed
    return found


def cluster_view(cluster: ClusterView) -> View:
    """Flatten the scheduler's view of the cluster.

    Times that change every second without an event are left out or rounded, so that an idle
    cluster has no differences.
    """
    instances = [(node, i) for node in cluster.nodes if node.alive for i in node.instances]
    states: dict[str, set[str]] = {}
    for _, instance in instances:
        if instance.state.holds_memory or instance.state.parked:
            states.setdefault(instance.model, set()).add(instance.state.value)
    adapters = {(a.name, i.model) for _, i in instances for a in i.load.adapters}
    return {
        "cluster": {"scheduler": {"id": cluster.scheduler, "epoch": cluster.epoch}},
        "models": {m.card.spec.name: _model(m, states, adapters) for m in cluster.models},
        "nodes": {node.node: _node(node) for node in cluster.nodes},
        "devices": {f"{node.node}/{d.device_id}": _device(node, d) for node in cluster.nodes for d in node.devices},
        "instances": {i.instance_id: _instance(node, i) for node, i in instances},
        "pulls": {f"{p.tier}/{p.node}/{p.model}": _pull(p) for p in cluster.pulls},
    }


def _state(view: ModelView, states: Mapping[str, set[str]], adapters: set[tuple[str, str]]) -> str:
    name, base = view.card.spec.name, view.card.spec.base
    if base is not None:
        return "loaded" if (name, base) in adapters else "cold"
    if found := states.get(name):
        return next((s for s in _STATES if s in found), min(found))
    if view.waiting:
        return "waiting"
    return "failed" if view.error else "cold"


def _model(view: ModelView, states: Mapping[str, set[str]], adapters: set[tuple[str, str]]) -> Record:
    spec, info, plan = view.card.spec, view.card.info, view.last_plan
    return {
        "state": _state(view, states, adapters),
        "engine": spec.engine,
        "pin": spec.pin,
        "task": info.task,
        "source": spec.public_source,
        "base": spec.base,
        "aliases": list(spec.aliases),
        "weights_bytes": info.weights_bytes,
        "context_length": view.card.context_length,
        "waiting": view.waiting,
        "error": view.error,
        "objective": view.objective.model_dump(mode="json") if view.objective else None,
        "park": view.park.model_dump(mode="json") if view.park else None,
        "plan": None
        if plan is None
        else {
            "plan_id": plan.plan_id,
            "way": plan.way,
            "outcome": plan.outcome,
            "trigger": plan.trigger,
            "node": plan.chosen.node if plan.chosen else None,
            "devices": list(plan.chosen.device_ids) if plan.chosen else [],
            "predicted_ms": plan.chosen.predicted_ms if plan.chosen else None,
            "measured_ms": plan.measured_ms,
            "created": plan.created,
        },
    }


def _node(node: NodeView) -> Record:
    loader = node.loader or LoaderView()
    return {
        "alive": node.alive,
        "cordoned": node.cordoned,
        "loader_alive": node.loader_alive,
        "labels": dict(node.labels),
        "snapshot_budget_bytes": node.snapshot_budget_bytes,
        "snapshot_bytes": sum(i.suspension.snapshot_bytes for i in node.instances),
        "dram_budget_bytes": loader.dram_budget_bytes,
        "dram_bytes": loader.dram_bytes,
        "ssd_budget_bytes": loader.ssd_budget_bytes,
        "ssd_bytes": loader.ssd_bytes,
        "loads": [load.model_dump(mode="json") for load in loader.loads],
        "links": [
            {
                "link": link.link,
                "bytes_per_second": _round(link.bytes_per_second),
                "is_paced": link.is_paced,
                "queued_bytes": link.queued_bytes,
                "loads": link.loads,
                "models": list(link.models),
                "moved_bytes": link.moved_bytes,
                "finish_ms": _round(link.finish_ms),
            }
            for link in loader.links
        ],
    }


def _device(node: NodeView, device: DeviceStatus) -> Record:
    separate = next((m for m in node.loader.memory if m.device_id == device.device_id), None) if node.loader else None
    return {
        "node": node.node,
        "device_id": device.device_id,
        "kind": device.kind,
        "name": device.name,
        "memory": device.memory,
        "budget_bytes": device.budget_bytes,
        "reserved_bytes": device.reserved_bytes,
        "executor_bytes": device.executor_bytes,
        "used_bytes": device.used_bytes,
        "separate": None if separate is None else _separate(separate),
    }


def _separate(memory: DeviceMemory) -> Record:
    return {
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "mapped_bytes": memory.mapped_bytes,
        "reusable_bytes": memory.reusable_bytes,
        "lent_bytes": memory.lent_bytes,
        "models": [
            u.model_dump(mode="json", include={"model", "mapped_bytes", "reusable_bytes", "shared_bytes"}) for u in memory.models
        ],
    }


def _instance(node: NodeView, i: InstanceStatus) -> Record:
    load = i.load
    return {
        "node": node.node,
        "model": i.model,
        "revision": i.revision,
        "devices": list(i.device_ids),
        "engine": i.engine,
        "state": i.state.value,
        "phase": i.phase.value if i.phase else None,
        "progress": round(i.progress, 2),
        "plan_id": i.plan_id,
        "weights_bytes": i.memory.weights,
        "private_bytes": i.memory.private,
        "kv_bytes": i.memory.kv,
        "reserved_bytes": i.memory.reserved,
        "capacity": i.capacity,
        "active": load.active,
        "waiting": load.waiting,
        "completed": load.completed,
        "tokens": load.generated_tokens,
        "idle_s": _idle_s(load.idle_ms / 1e3) if i.state is InstanceState.READY and not load.active else None,
        "can_suspend": i.suspension.possible,
        "cannot_suspend": i.suspension.reason,
        "suspended_by": i.suspension.way if i.state.parked else None,
        "snapshot_bytes": i.suspension.snapshot_bytes,
        "swap_bytes": i.suspension.swap_bytes,
        "error": i.error.message if i.error else None,
        "adapters": [a.name for a in load.adapters],
    }


def _pull(pull: PullView) -> Record:
    return pull.model_dump(mode="json") | {"bytes_per_second": _round(pull.bytes_per_second)}


def _idle_s(seconds: float) -> int:
    """Round an idle time to what a person reads: to 10 s, to a minute, to an hour."""
    for limit, unit in ((60, 10), (3600, 60)):
        if seconds < limit:
            return int(seconds // unit) * unit
    return int(seconds // 3600) * 3600


def _round(value: float | None) -> float | None:
    """Round a learned bandwidth to three digits."""
    return None if value is None else float(f"{value:.3g}")


def active_view(replies: Iterable[RequestsViewed]) -> View:
    """Return the active requests of all gateways, by request id, and their number."""
    listed = list(replies)
    return {
        "active": {r.request_id: r.model_dump(mode="json", exclude={"request_id"}) for g in listed for r in g.requests},
        "gateways": {g.gateway: {"active": g.total} for g in listed},
    }


def request_record(trace: RequestTrace) -> Record:
    """Summarize a finished request for the list of requests."""
    return {
        "model": trace.model,
        "endpoint": trace.endpoint,
        "received": trace.received,
        "instance_id": trace.instance_id,
        "cold": trace.cold,
        "status": trace.status,
        "error": trace.error,
        "ttft_ms": trace.ttft_ms,
        "duration_ms": trace.duration_ms,
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "phases": _by_phase(trace),
        "moves": len(trace.handovers),
    }


def _by_phase(trace: RequestTrace) -> dict[str, float]:
    """Return the milliseconds of each phase on the critical path."""
    totals: dict[str, float] = {}
    for segment in trace.critical_path:
        totals[segment.phase.value] = round(totals.get(segment.phase.value, 0.0) + segment.duration_ms, 1)
    return totals


def list_latest(traces: Iterable[RequestTrace], limit: int) -> dict[str, Record]:
    """Return the records of the last `limit` traces by request id."""
    return {t.request_id: request_record(t) for t in list(traces)[-limit:]}
