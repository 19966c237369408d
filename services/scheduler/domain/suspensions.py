"""Suspensions and resumptions that nodes report, for the metrics.

A status has only the last suspension and resumption of each instance. Its duration shows whether
it is another one than before: the time of its end is computed again for each status, and varies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.contracts.node import InstanceStatus, NodeStatus, Timing

Kind = Literal["suspend", "resume"]


@dataclass(frozen=True, slots=True)
class SuspensionStep:
    """A suspension or resumption that is over.

    Attributes:
        way: As `SuspendWay`; empty: the node did not say.
        took_ms: From its begin until its end.
    """

    kind: Kind
    node: str
    model: str
    way: str
    took_ms: float


@dataclass(slots=True)
class _Node:
    boot_id: str = ""
    seq: int = -1
    last_ms: dict[tuple[str, Kind], float] = field(default_factory=dict)


class SuspensionWatch:
    """Finds what is new in each node's statuses, in one term of the scheduler.

    The first status of a node counts nothing: an earlier leader may have counted it. A step is
    missed if an instance takes another one of the same kind before its node's next message arrives.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def on_status(self, status: NodeStatus) -> list[SuspensionStep]:
        """Return the steps that are over since the node's last status."""
        before = self._nodes.get(status.node)
        if before is not None and before.boot_id == status.boot_id and status.seq < before.seq:
            return []
        now = {(i.instance_id, kind): (i, timing.took_ms) for i in status.instances for kind, timing in _timings(i)}
        last_ms = {key: took_ms for key, (_, took_ms) in now.items()}
        self._nodes[status.node] = _Node(status.boot_id, status.seq, last_ms)
        if before is None:
            return []
        return [
            SuspensionStep(key[1], status.node, i.model, i.suspension.way or "", took_ms)
            for key, (i, took_ms) in now.items()
            if before.last_ms.get(key) != took_ms
        ]

    def forget(self, node: str) -> None:
        """Remove a node that is gone. If it reports again, it is a new one."""
        self._nodes.pop(node, None)


def _timings(instance: InstanceStatus) -> list[tuple[Kind, Timing]]:
    found: list[tuple[Kind, Timing]] = []
    if instance.suspended is not None:
        found.append(("suspend", instance.suspended))
    if instance.resumed is not None:
        found.append(("resume", instance.resumed))
    return found


def parked_bytes(instance: InstanceStatus) -> dict[str, int]:
    """Return the bytes of a suspended instance's snapshot, by place: host memory and swap."""
    suspension = instance.suspension
    # All of a paged-out snapshot is in swap; what others have there is beside the snapshot.
    host = 0 if suspension.way == "cpu" else suspension.snapshot_bytes
    return {"host": host, "swap": suspension.swap_bytes}
