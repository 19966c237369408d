"""Publishes the node's status: on change, every second, on request.

A node with many instances publishes only what has changed, and its whole status every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from nats.errors import Error as NatsError

from services.nodeagent.adapters.meter import Meter
from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.devices.inventory import device_status
from services.nodeagent.devices.port import Device
from services.nodeagent.domain import templates
from services.nodeagent.domain.ended_engines import KEPT_S, SHOWN_S, list_ended
from services.nodeagent.domain.state import Instance, NodeState
from services.nodeagent.domain.status import instance_status
from shared.contracts import subjects
from shared.contracts.node import STATUS_INTERVAL_S, Capability, DeviceStatus, InstanceStatus, NodeChanges, NodeStatus, SwapSpace
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_COALESCE_S = 0.005
_COALESCE_LOADS_S = 0.1
_CAPABILITIES_EVERY_S = 10.0
_WHOLE_UP_TO = 4
"""Instances, also ended ones, whose whole status costs no more than to find out what has changed.

The costs of receivers count too: the scheduler examines each instance of a whole status.
"""


class Publisher:
    """Builds and publishes the status.

    Changes within 5 ms make one message, except those that requests wait for. Changes of load and
    progress alone wait up to 100 ms, because gateways count their own requests, and so do the steps
    of an attach.
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
        swap: Callable[[], SwapSpace],
    ) -> None:
        self._mesh = mesh
        self._node = node
        self._labels = labels
        self._devices = devices
        self._state = state
        self._meter = meter
        self._timelines = timelines
        self._find_capabilities = capabilities
        self._read_swap = swap
        self._swap: SwapSpace | None = None
        self._capabilities: tuple[Capability, ...] = ()
        self._looked_at = float("-inf")
        self._boot_id = uuid.uuid4().hex
        self._seq = 0
        self._whole_at = float("-inf")
        self._published: Mapping[str, Instance] = {}
        self._wanted = False
        self._urgent = asyncio.Event()
        self._awaited = asyncio.Event()
        self._changed = asyncio.Event()

    def notify_changed(self, *, urgent: bool, is_awaited: bool = False) -> None:
        """Publish soon.

        Args:
            urgent: More than load and progress has changed.
            is_awaited: Requests wait for the change.
        """
        self._changed.set()
        if urgent:
            self._urgent.set()
        if is_awaited:
            self._awaited.set()

    def want_whole(self) -> None:
        """Publish the whole status now."""
        self._wanted = True
        self.notify_changed(urgent=True)

    async def run(self) -> None:
        while True:
            is_due = self._wanted or time.monotonic() - self._whole_at >= STATUS_INTERVAL_S
            if is_due or len(self._state().instances) <= _WHOLE_UP_TO:
                await self.publish()
            else:
                await self._publish_changes()
            await _wait_within(self._changed, max(0.0, self._whole_at + STATUS_INTERVAL_S - time.monotonic()))
            if self._changed.is_set() and not self._urgent.is_set():
                await _wait_within(self._urgent, _COALESCE_LOADS_S)
            if self._urgent.is_set():
                await _wait_within(self._awaited, _COALESCE_S)

    async def publish(self) -> None:
        """Publish the whole status."""
        self._begin()
        ended_s = KEPT_S if self._wanted else SHOWN_S
        self._wanted = False
        self._whole_at = time.monotonic()
        if time.monotonic() - self._looked_at > _CAPABILITIES_EVERY_S:
            self._looked_at = time.monotonic()
            self._capabilities = await asyncio.to_thread(self._find_capabilities)
            self._swap = await asyncio.to_thread(self._read_swap)
        try:
            await self._mesh.publish(subjects.node_status(self._node), self.status(ended_s))
        except NatsError as e:  # the next status, a second later, has the same content
            log.warning("failed to publish the node's status", extra={"error": repr(e)})

    def _begin(self) -> None:
        self._clear()
        self._seq += 1

    def _clear(self) -> None:
        for event in (self._changed, self._urgent, self._awaited):
            event.clear()

    async def _publish_changes(self) -> None:
        """Publish the instances that have changed since the last message.

        Measurements of memory do not count as changes: the next whole status has them.
        """
        instances = self._state().instances
        changed = [i for key, i in instances.items() if self._published.get(key) is not i]
        self._clear()
        if not changed:
            return
        self._begin()
        self._published = instances
        changes = NodeChanges(
            node=self._node,
            boot_id=self._boot_id,
            seq=self._seq,
            devices=self._list_devices(),
            instances=self._list_instances(changed),
        )
        try:
            await self._mesh.publish(subjects.node_changes(self._node), changes)
        except NatsError as e:  # the next whole status has them
            log.warning("failed to publish the node's changes", extra={"error": repr(e)})

    def status(self, ended_s: float = SHOWN_S) -> NodeStatus:
        """Return the whole status, with the engines that ended in the last `ended_s`."""
        state = self._state()
        self._published = state.instances
        return NodeStatus(
            node=self._node,
            boot_id=self._boot_id,
            seq=self._seq,
            labels=self._labels,
            devices=self._list_devices(),
            instances=self._list_instances(state.instances.values()),
            stopping=state.stopping,
            snapshot_bytes=state.snapshot_bytes,
            snapshot_budget_bytes=state.snapshot_budget,
            swap=self._swap,
            capabilities=self._capabilities,
            ended_engines=tuple(e.engine for e in list_ended(state.ended_engines, time.monotonic(), ended_s)),
        )

    def _list_devices(self) -> tuple[DeviceStatus, ...]:
        ledger = self._state().ledger
        return tuple(
            device_status(d, ledger.sum_reserved(i), self._meter.get_used(i), ledger.executor_bytes(i))
            for i, d in self._devices.items()
        )

    def _list_instances(self, instances: Iterable[Instance]) -> tuple[InstanceStatus, ...]:
        state = self._state()
        wall = time.time() - time.monotonic()
        keys = templates.find_offered(state)
        return tuple(
            instance_status(
                state,
                instance,
                self._meter.get_private(instance.instance_id),
                self._meter.weights(instance.instance_id),
                self._timelines.spans(instance),
                wall,
                keys.get(instance.instance_id, ""),
            )
            for instance in instances
        )


async def _wait_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
