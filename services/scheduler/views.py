"""The operators' view of the cluster, read from the loop's state."""

from __future__ import annotations

from services.scheduler.domain.demand.slo import usage_of
from services.scheduler.domain.policies.torpor_queue import required_requests
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.prewarm.parking import park_view
from services.scheduler.domain.prewarm.pulls import view_pulls
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Instance, Model, Node
from shared.contracts.admin import ClusterView, LoaderView, LoadView, ModelView, NodeView, ObjectiveView
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceStatus
from shared.contracts.phases import Phase
from shared.contracts.plans import PlanRecord


def view(state: ClusterState, scheduler: str, now: float, policy: Policy, *, brief: bool = False) -> ClusterView:
    """Return the view; a brief one leaves out the candidates and measured phases of plans."""
    models = tuple(
        ModelView(
            card=m.card,
            waiting=state.waiting_count(m.key),
            last_plan=_shorten(state.last_plan_of(m.key)) if brief else state.last_plan_of(m.key),
            error=m.error,
            objective=_objective(state, m, now),
            park=park_view(state, m, now, policy),
        )
        for m in sorted(state.models.values(), key=lambda m: m.key)
    )
    nodes = tuple(_node(state, n, now, policy) for n in sorted(state.nodes.values(), key=lambda n: n.name))
    return ClusterView(
        scheduler=scheduler,
        epoch=state.epoch,
        models=models,
        nodes=nodes,
        policy=policy.profile.name,
        pulls=view_pulls(state, now),
    )


def _shorten(plan: PlanRecord | None) -> PlanRecord | None:
    return plan.model_copy(update={"candidates": (), "measured": ()}) if plan is not None else None


def _objective(state: ClusterState, model: Model, now: float) -> ObjectiveView | None:
    counts = state.slo_counts.get(model.key)
    if counts is None or not model.card.spec.slo.is_set:
        return None
    usage = usage_of(counts, model, now)
    return ObjectiveView(total=usage.total, met=usage.met, percentile=usage.percentile, required=required_requests(usage))


def _node(state: ClusterState, node: Node, now: float, policy: Policy) -> NodeView:
    presence = state.presence.get(node.name)
    status = presence.status if presence else None
    alive = presence is not None and presence.alive and status is not None
    claims = tuple(_claim(i) for i in state.on_node(node.name) if i.is_claim)
    unheard = tuple(
        DeviceStatus(device_id=d.device_id, kind=d.kind, name=d.name, budget_bytes=d.budget_bytes, reserved_bytes=0)
        for d in node.devices
    )
    return NodeView(
        node=node.name,
        alive=alive,
        cordoned=node.cordoned,
        loader_alive=state.is_loader_alive(node.name, now, policy.node_lost_after_s),
        last_seen_ms=int((now - presence.last_message_at) * 1e3) if presence and status else None,
        labels=node.labels,
        devices=status.devices if status else unheard,
        instances=(*(status.instances if status and alive else ()), *claims),
        snapshot_budget_bytes=status.snapshot_budget_bytes if status else 0,
        loader=_loader(state, node.name),
        capabilities=status.capabilities if status and alive else (),
    )


def _loader(state: ClusterState, node: str) -> LoaderView | None:
    presence = state.loaders.get(node)
    if presence is None:
        return None
    status = presence.status
    return LoaderView(
        dram_budget_bytes=status.dram_budget_bytes,
        dram_bytes=status.dram_bytes,
        ssd_budget_bytes=status.ssd_budget_bytes,
        ssd_bytes=status.ssd_bytes,
        bytes_per_second=status.bytes_per_second,
        links=status.links,
        memory=status.memory,
        loads=tuple(
            LoadView(
                model=s.model,
                total_bytes=s.total_bytes,
                loaded_bytes=s.loaded_bytes,
                fetched_bytes=s.fetched_bytes,
                on_devices=s.on_devices,
            )
            for s in status.segments
            if s.error is None and not s.is_partial and (s.loaded_bytes < s.total_bytes or not s.total_bytes)
        ),
    )


def _claim(i: Instance) -> InstanceStatus:
    """Return the view of a claim, which no nodeagent knows yet."""
    return InstanceStatus(
        instance_id=i.instance_id,
        plan_id=i.plan_id,
        token=i.token,
        model=i.model,
        generation=i.generation,
        revision=i.revision,
        device_ids=i.device_ids,
        state=i.state,
        phase=Phase.RESERVE,
        memory=InstanceMemory(reserved=i.reserve_bytes),
        traceparent=i.traceparent,
    )
