"""The latest status of each node, from whole statuses and the changes between them."""

from __future__ import annotations

from shared.contracts.node import NodeChanges, NodeStatus

FORGOTTEN_AFTER_S = 86_400.0
"""A node that was silent for so long is forgotten. Autoscaled nodes have new names all the time."""


class NodeStatuses:
    """Applies each node's messages in the order in which it sent them."""

    def __init__(self) -> None:
        self._latest: dict[str, NodeStatus] = {}
        self._last_message_at: dict[str, float] = {}
        """Time of each node's last whole status, the oldest first."""

    def on_status(self, status: NodeStatus, now: float) -> None:
        """Store a whole status, unless a newer message has overtaken it.

        Args:
            status: The status.
            now: Monotonic seconds.
        """
        latest = self._latest.get(status.node)
        if latest is None or latest.boot_id != status.boot_id or status.seq >= latest.seq:
            self._latest[status.node] = status
        self._last_message_at.pop(status.node, None)
        self._last_message_at[status.node] = now
        while self._last_message_at[node := next(iter(self._last_message_at))] < now - FORGOTTEN_AFTER_S:
            del self._latest[node], self._last_message_at[node]

    def on_changes(self, changes: NodeChanges) -> NodeStatus | None:
        """Return the node's status with the changes.

        None: its whole status is not known, or a newer message has overtaken them.
        """
        latest = self._latest.get(changes.node)
        if latest is None or latest.boot_id != changes.boot_id or changes.seq <= latest.seq:
            return None
        instances = {i.instance_id: i for i in latest.instances} | {i.instance_id: i for i in changes.instances}
        update = {"seq": changes.seq, "devices": changes.devices, "instances": tuple(instances.values())}
        self._latest[changes.node] = status = latest.model_copy(update=update)
        return status
