"""Device time of engines that is charged to no request, as the nodes report it (ADR 0097)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.node import NodeStatus


@dataclass(frozen=True, slots=True)
class BackgroundReading:
    """What an engine's meter of such time shows.

    Attributes:
        engine: Id of the instance, and of the process: an instance may get another one.
        plan_id: The plan whose start made the work necessary; empty: none did.
        us: Microseconds since the engine's start, times the devices of the instance.
    """

    engine: str
    plan_id: str
    model: str
    device_kind: str
    us: int


def find_processes(status: NodeStatus, known: Mapping[str, int]) -> dict[str, int]:
    """Return the processes of a node's instances, ended ones as `known` before."""
    found = {s.instance_id: s.pids[0] if s.pids else known.get(s.instance_id, 0) for s in status.instances}
    return {instance_id: pid for instance_id, pid in found.items() if pid}


def list_background(status: NodeStatus, processes: Mapping[str, int]) -> Iterator[BackgroundReading]:
    """Yield the readings of a node's engines; those of a group are at its first stage."""
    for s in status.instances:
        kind = s.device_ids[0].partition(":")[0] if s.device_ids else ""
        if kind and s.instance_id in processes and not s.is_later_stage:
            engine = f"{s.instance_id}/{processes[s.instance_id]}"
            for work in s.load.background:
                yield BackgroundReading(engine, work.plan_id, s.model, kind, round(work.seconds * 1e6) * s.device_count)
