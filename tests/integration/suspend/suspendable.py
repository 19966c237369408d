"""Engines that a node has started and can suspend."""

from __future__ import annotations

from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import Node

READY, SUSPENDED, STOPPED = InstanceState.READY, InstanceState.SUSPENDED, InstanceState.STOPPED
BIG: dict[str, object] = {"ballast_mib": 200, "ready_after": 1.0}
"""An engine that starts slower than it resumes."""


async def ready(node: Node, stub: dict[str, object], *, mib: int = 400) -> str:
    instance_id = await node.start(stub, mib=mib)
    await node.reaches(instance_id, READY)
    await node.until(lambda s: any(i.instance_id == instance_id and i.suspension.possible for i in s.instances))
    return instance_id
