"""Recorded effects of the dispatcher, and builders of tickets and statuses."""

from __future__ import annotations

from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import Demand
from shared.contracts.engine import EngineLoad
from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus, NodeStatus
from shared.errors import ThawError


class RecordedEffects:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        self.failed: dict[str, ThawError] = {}
        self.demands: list[Demand] = []
        self.probed: list[str] = []

    def send(self, ticket: Ticket, route: Route) -> None:
        assert ticket.instance_id is not None
        self.sent.append((ticket.id, ticket.instance_id))

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket.id)

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        assert ticket.id not in self.failed, "failed twice"
        self.failed[ticket.id] = error

    def probe(self, ticket: Ticket) -> None:
        self.probed.append(ticket.id)

    def on_requeued(self, ticket: Ticket) -> None:
        """Ignore the call."""

    def publish_demand(self, demand: Demand) -> None:
        self.demands.append(demand)


def ticket(name: str, model: str = "m", now: float = 0.0, wait: float = 10.0, response: float = 100.0) -> Ticket:
    return Ticket(name, model, now, now + wait, response, f"00-{'1' * 32}-{'2' * 16}-01")


def instance(
    name: str, model: str = "m", state: InstanceState = InstanceState.READY, capacity: int = 1, active: int = 0
) -> InstanceStatus:
    return InstanceStatus(
        instance_id=name,
        plan_id="p",
        token=1,
        model=model,
        generation=1,
        revision="0",
        device_ids=("cpu:0",),
        state=state,
        capacity=capacity,
        load=EngineLoad(active=active),
    )


_seq = 0


def status(*instances: InstanceStatus, node: str = "n", boot: str = "b") -> NodeStatus:
    global _seq
    _seq += 1
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=1, reserved_bytes=0)
    return NodeStatus(node=node, boot_id=boot, seq=_seq, devices=(device,), instances=instances)
