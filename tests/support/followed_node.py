"""A node's statuses as the services see them: whole ones, and changes between them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from shared.contracts import subjects
from shared.contracts.node import NodeChanges, NodeStatus
from shared.messaging import Mesh
from shared.node_statuses import NodeStatuses


async def follow_node(mesh: Mesh, node: str, on_status: Callable[[NodeStatus], Awaitable[None]]) -> None:
    """Call `on_status` with the node's status at each of its messages."""
    statuses = NodeStatuses()

    async def hear(status: NodeStatus) -> None:
        statuses.on_status(status, time.monotonic())
        await on_status(status)

    async def hear_changes(changes: NodeChanges) -> None:
        if (status := statuses.on_changes(changes)) is not None:
            await on_status(status)

    await mesh.listen(subjects.node_status(node), NodeStatus, hear).start()
    await mesh.listen(subjects.node_changes(node), NodeChanges, hear_changes).start()
