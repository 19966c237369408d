"""A node's state as the mesh hears it."""

from __future__ import annotations

from services.nodeagent.domain.state import Instance, NodeState, Process
from shared.contracts.node import InstanceMemory, InstanceStatus
from shared.contracts.phases import PhaseSpan


def instance_status(
    state: NodeState, instance: Instance, private: int, weights: int, phases: tuple[PhaseSpan, ...]
) -> InstanceStatus:
    """`private` and `weights`: bytes as measured; none are left of an instance whose process is gone."""
    command, card = instance.command, instance.command.card
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
        pids=(instance.pid,) if alive and instance.pid is not None else (),
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
        error=instance.error,
    )
