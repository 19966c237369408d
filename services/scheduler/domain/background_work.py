"""Device time of engines that is charged to no request, as the nodes report it (ADR 0097)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.contracts.node import NodeStatus


@dataclass(frozen=True, slots=True)
class BackgroundReading:
    """What an engine's meter of such time shows.

    Attributes:
        plan_id: The plan whose start made the work necessary; empty: none did.
        us: Microseconds since the engine's start, times the devices of the instance.
    """

    instance_id: str
    plan_id: str
    model: str
    device_kind: str
    us: int


def list_background(status: NodeStatus) -> Iterator[BackgroundReading]:
    """Yield the readings of a node's engines; those of a group are at its first stage."""
    for s in status.instances:
        kind = s.device_ids[0].partition(":")[0] if s.device_ids else ""
        if kind and not s.is_later_stage:
            for work in s.load.background:
                yield BackgroundReading(s.instance_id, work.plan_id, s.model, kind, round(work.seconds * 1e6) * s.device_count)
