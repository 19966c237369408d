"""Who holds how many bytes of a device, and who has been promised some."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.domain.entities import Instance
from services.scheduler.domain.state import ClusterState


@dataclass(frozen=True, slots=True)
class Booking:
    """Bytes of one device. `held` is never let over `budget`; `held - leaving + claimed` neither."""

    budget: int
    held: int
    claimed: int
    leaving: int

    @property
    def free(self) -> int:
        """Free now and promised to nobody."""
        return self.budget - self.held - self.claimed

    @property
    def coming(self) -> int:
        """Free and promised to nobody once those that leave have left."""
        return self.free + self.leaving


def booking(state: ClusterState, node: str, device_id: str) -> Booking:
    """The booking of a device.

    Bytes count as held from the moment a start is sent until the nodeagent reports the instance gone; and what a nodeagent holds
    beyond the instances known here (a process not proved gone yet) counts too.
    """
    held = claimed = leaving = known = 0
    for i in state.on_node(node):
        if device_id not in i.device_ids:
            continue
        if i.claim:
            claimed += i.reserve_bytes
            continue
        held += i.reserve_bytes
        if i.leaving != "no":
            leaving += i.reserve_bytes
        if (seen := state.seen.get(i.instance_id)) and seen.status.state.holds_memory:
            known += i.reserve_bytes
    presence = state.presence.get(node)
    reported = presence.status if presence else None
    for device in reported.devices if reported else ():
        if device.device_id == device_id:
            held += max(0, device.reserved_bytes - known)
    return Booking(_budget(state, node, device_id), held, claimed, leaving)


def _budget(state: ClusterState, node: str, device_id: str) -> int:
    found = state.nodes.get(node)
    return next((d.budget_bytes for d in found.devices if d.device_id == device_id), 0) if found else 0


def claims(state: ClusterState, node: str, device_id: str) -> list[Instance]:
    """Those waiting for bytes of the device, first come first."""
    waiting = (i for i in state.on_node(node) if i.claim and device_id in i.device_ids)
    return sorted(waiting, key=lambda i: (i.planned_at, i.token))
