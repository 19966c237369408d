"""Have paused engines serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.nodeagent.domain.resuming import has_to_serve_again
from services.nodeagent.domain.state import Instance, NodeState
from services.nodeagent.suspend.suspender import Suspender
from shared.errors import ThawError
from shared.messaging import Mesh

_ASK_AGAIN_S = 0.1


class Unpausing:
    """Has paused engines serve again, with one task for each instance."""

    def __init__(self, mesh: Mesh, suspender: Suspender, state: Callable[[], NodeState]) -> None:
        self._mesh = mesh
        self._suspender = suspender
        self._state = state
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep(self, instance_id: str, task: asyncio.Task[None]) -> None:
        """Keep the task that unpauses an instance; an earlier one has been ended."""
        self._tasks[instance_id] = task
        task.add_done_callback(lambda ended: self._forget(instance_id, ended))

    def end(self, instance_id: str) -> None:
        """Cancel the instance's task, if any; a newer effect decides.

        Otherwise the task could thaw or wake an engine after its suspension. NATS delivers what it
        has sent before what is sent from now on.
        """
        task = self._tasks.pop(instance_id, None)
        if task is not None:
            task.cancel()

    def _forget(self, instance_id: str, ended: asyncio.Task[None]) -> None:
        if self._tasks.get(instance_id) is ended:
            del self._tasks[instance_id]

    async def unpause(self, instance: Instance) -> int:
        """Have a paused engine serve again, and return the bytes that it holds.

        While NATS is unreachable, an engine without an answer is not to blame, and is asked again,
        unless the instance is being suspended or stopped.

        Raises:
            RestoreFailed: It does not serve as before.
        """
        while True:
            reconnections = self._mesh.reconnections
            try:
                return await self._suspender.resume(instance, None)
            except ThawError:
                if not (self._is_wanted(instance) and was_nats_away(self._mesh, reconnections)):
                    raise
                await asyncio.sleep(_ASK_AGAIN_S)
                if not self._is_wanted(instance):  # it may be suspended, and has to stay so
                    raise

    def _is_wanted(self, instance: Instance) -> bool:
        return has_to_serve_again(self._state(), instance.instance_id)


def was_nats_away(mesh: Mesh, reconnections: int) -> bool:
    """True if NATS is unreachable, or was since `Mesh.reconnections` had this value."""
    return not mesh.is_connected or mesh.reconnections != reconnections
