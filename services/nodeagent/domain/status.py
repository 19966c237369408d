"""The node's status message."""

from __future__ import annotations

from services.nodeagent.domain.state import Instance, NodeState, Process, TimedStep
from services.nodeagent.domain.suspending import not_suspendable_reason
from shared.contracts.node import InstanceMemory, InstanceState, InstanceStatus, Suspension, Timing
from shared.contracts.phases import PhaseSpan
from shared.contracts.stages import GroupPlace


def instance_status(
    state: NodeState,
    instance: Instance,
    private: int,
    weights: int,
    phases: tuple[PhaseSpan, ...],
    wall: float,
    template_key: str = "",
) -> InstanceStatus:
    """The status of one instance.

    Args:
        private: Measured private memory in bytes.
        weights: Measured bytes of weight segments.
        phases: Phases of its start.
        wall: Unix time minus monotonic time.
        template_key: Its template key, if other models may take its engine.
    """
    command, card, stage = instance.command, instance.command.card, instance.command.stage
    booking = state.ledger.bookings.get(instance.instance_id)
    alive = instance.process is Process.ALIVE
    held = instance.ended_at is None
    loaded = min(1.0, instance.loaded_bytes / card.info.weights_bytes) if card.info.weights_bytes else 0.0
    return InstanceStatus(
        instance_id=instance.instance_id,
        plan_id=command.plan_id,
        token=instance.token,
        model=card.name,
        generation=card.generation,
        revision=card.info.revision,
        device_ids=command.device_ids,
        state=instance.state,
        phase=instance.phase,
        progress=max(instance.progress, loaded) if instance.state.starting else instance.progress,
        pids=tuple(dict.fromkeys((instance.pid, *instance.engine_pids))) if alive and instance.pid is not None else (),
        ended_pid=instance.pid or 0 if not alive else 0,
        memory=InstanceMemory(
            weights=weights if held else 0,
            private=private if alive else 0,
            kv=instance.load.kv_bytes_used if alive else 0,
            reserved=booking.bytes_each * len(booking.device_ids) if booking is not None else 0,
        ),
        freed_bytes=instance.freed_bytes if instance.ended_at is not None else None,
        capacity=card.spec.max_concurrency,
        load=instance.load,
        phases=phases,
        traceparent=command.traceparent,
        error=instance.error or instance.suspend_state.no_memory_error,
        engine=card.spec.engine,
        accepts_requests=instance.accepts_requests and instance.state is InstanceState.LOADING and not instance.stop_asked,
        suspension=suspension(state, instance),
        started=_timing(instance.suspend_state.started, wall),
        suspended=_timing(instance.suspend_state.suspended, wall),
        resumed=_timing(instance.suspend_state.resumed, wall),
        template_key=template_key,
        template=instance.taken_from,
        bound_by=instance.binding.rule if instance.binding is not None else "",
        group=GroupPlace(first=stage.first, index=stage.index, count=stage.count) if stage is not None and stage.first else None,
    )


def suspension(state: NodeState, instance: Instance) -> Suspension:
    p = instance.suspend_state
    against = not_suspendable_reason(state, instance)
    expected = p.resume_s if p.resume_s is not None else p.outlook.resume_s
    return Suspension(
        possible=not against,
        assessed=p.outlook.is_assessed,
        reason=against,
        way=p.outlook.way,
        freed_bytes=p.frees_bytes,
        left_bytes=p.outlook.left_bytes,
        snapshot_bytes=p.snapshot_bytes,
        swap_bytes=p.snapshot_bytes if p.outlook.way == "cpu" else p.spilled_bytes,
        need_bytes=p.need_bytes or instance.command.reserve_bytes,
        resume_ms=expected * 1e3 if p.outlook.way is not None else None,
        resumes=p.resumes,
        fell_back=p.fell_back,
        moves_to=p.outlook.moves_to if not p.left_bytes else (),
    )


def _timing(lap: TimedStep | None, wall: float) -> Timing | None:
    return Timing(at=lap.at + wall, took_ms=lap.took_s * 1e3) if lap is not None else None
