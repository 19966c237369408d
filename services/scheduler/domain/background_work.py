"""Device time of engines as the nodes report it: charged to no request, or to ended ones.

See ADRs 0097 and 0101.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.node import EndedEngine, NodeStatus

CHARGED = "(charged)"
"""Stands for the plan in a reading of what an engine has charged to requests that ended."""


@dataclass(frozen=True, slots=True)
class BackgroundReading:
    """A reading of an engine's meter of such time.

    Attributes:
        engine: Id of the instance, and of the process: an instance may get another one.
        plan_id: The plan whose start made the work necessary; empty: none did;
            or `CHARGED`.
        us: Microseconds since the engine's start, times the devices of the instance.
    """

    engine: str
    plan_id: str
    model: str
    device_kind: str
    us: int


def find_processes(status: NodeStatus, known: Mapping[str, int]) -> dict[str, int]:
    """Return the processes of a node's instances, ended ones as `known` before."""
    found = {s.instance_id: s.pids[0] if s.pids else s.ended_pid or known.get(s.instance_id, 0) for s in status.instances}
    return {instance_id: pid for instance_id, pid in found.items() if pid}


def list_background(status: NodeStatus, processes: Mapping[str, int]) -> Iterator[BackgroundReading]:
    """Yield the readings of a node's engines, ended ones included.

    Those of a group are at its first stage.
    """
    for s in status.instances:
        kind = s.device_ids[0].partition(":")[0] if s.device_ids else ""
        if kind and s.instance_id in processes and not s.is_later_stage:
            engine = EndedEngine(
                instance_id=s.instance_id,
                pid=processes[s.instance_id],
                model=s.model,
                device_kind=kind,
                device_count=s.device_count,
                charged_s=s.load.charged_s,
                background=s.load.background,
            )
            yield from _read(engine)
    for ended in status.ended_engines:
        yield from _read(ended)


def _read(e: EndedEngine) -> Iterator[BackgroundReading]:
    engine = f"{e.instance_id}/{e.pid}"
    for work in e.background:
        yield BackgroundReading(engine, work.plan_id, e.model, e.device_kind, round(work.seconds * 1e6) * e.device_count)
    if e.charged_s is not None:
        yield BackgroundReading(engine, CHARGED, e.model, e.device_kind, round(e.charged_s * 1e6) * e.device_count)


def find_uncounted(status: NodeStatus) -> set[tuple[str, str]]:
    """Return models and kinds of devices of engines that do not say what they charge to requests.

    Those are engines of an earlier version.
    """
    engines = (s for s in status.instances if s.device_ids and not s.is_later_stage)
    return {(s.model, s.device_ids[0].partition(":")[0]) for s in engines if s.load.busy_s and s.load.charged_s is None}
