"""Publishes the node's status: on change, every second, on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping

from nats.errors import Error as NatsError

from services.nodeagent.adapters.meter import Meter
from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.devices.inventory import device_status
from services.nodeagent.devices.port import Device
from services.nodeagent.domain import templates
from services.nodeagent.domain.state import NodeState
from services.nodeagent.domain.status import instance_status
from shared.contracts import subjects
from shared.contracts.node import STATUS_INTERVAL_S, Capability, NodeStatus
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_COALESCE_S = 0.005
_COALESCE_LOADS_S = 0.1
_CAPABILITIES_EVERY_S = 10.0


class Publisher:
    """Builds and publishes the status.

    Changes within 5 ms make one message. Changes of load and progress alone wait up to 100 ms,
    because gateways count their own requests.
    """

    def __init__(
        self,
        mesh: Mesh,
        node: str,
        labels: dict[str, str],
        devices: Mapping[str, Device],
        state: Callable[[], NodeState],
        meter: Meter,
        timelines: Timelines,
        capabilities: Callable[[], tuple[Capability, ...]],
    ) -> None:
        self._mesh = mesh
        self._node = node
        self._labels = labels
        self._devices = devices
        self._state = state
        self._meter = meter
        self._timelines = timelines
        self._find_capabilities = capabilities
        self._capabilities: tuple[Capability, ...] = ()
        self._looked_at = float("-inf")
        self._boot_id = uuid.uuid4().hex
        self._seq = 0
        self._urgent = asyncio.Event()
        self._changed = asyncio.Event()

    def notify_changed(self, *, urgent: bool) -> None:
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        while True:
            await self.publish()
            await _wait_within(self._changed, STATUS_INTERVAL_S)
            if self._changed.is_set() and not self._urgent.is_set():
                await _wait_within(self._urgent, _COALESCE_LOADS_S)
            if self._urgent.is_set():
                await asyncio.sleep(_COALESCE_S)

    async def publish(self) -> None:
        self._changed.clear()
        self._urgent.clear()
        self._seq += 1
        if time.monotonic() - self._looked_at > _CAPABILITIES_EVERY_S:
            self._looked_at = time.monotonic()
            self._capabilities = await asyncio.to_thread(self._find_capabilities)
        try:
            await self._mesh.publish(subjects.node_status(self._node), self.status())
        except NatsError as e:  # the next status, a second later, has the same content
            log.warning("failed to publish the node's status", extra={"error": repr(e)})

    def status(self) -> NodeStatus:
        state = self._state()
        wall = time.time() - time.monotonic()
        keys = templates.find_offered(state)
        return NodeStatus(
            node=self._node,
            boot_id=self._boot_id,
            seq=self._seq,
            labels=self._labels,
            devices=tuple(
                device_status(d, state.ledger.sum_reserved(i), self._meter.get_used(i), state.ledger.executor_bytes(i))
                for i, d in self._devices.items()
            ),
            instances=tuple(
                instance_status(
                    state,
                    instance,
                    self._meter.get_private(instance.instance_id),
                    self._meter.weights(instance.instance_id),
                    self._timelines.spans(instance),
                    wall,
                    keys.get(instance.instance_id, ""),
                )
                for instance in state.instances.values()
            ),
            stopping=state.stopping,
            snapshot_bytes=state.snapshot_bytes,
            snapshot_budget_bytes=state.snapshot_budget,
            capabilities=self._capabilities,
        )


async def _wait_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
