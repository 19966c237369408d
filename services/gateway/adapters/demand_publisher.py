"""Publication of demand: the latest queue length of each model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.contracts import subjects
from shared.contracts.demand import Demand, DemandNoted
from shared.errors import InsufficientMemory, InvalidModel, ModelNotFound, ThawError, Unreachable
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_PERMANENT = (InvalidModel, InsufficientMemory, ModelNotFound)
"""Refusals after which waiting longer cannot help."""


class DemandPublisher:
    """Send demand to the scheduler.

    Demand is a level: a newer message replaces one that has not been sent. A failure is not
    retried, since the dispatcher publishes again with its next tick.
    """

    def __init__(
        self,
        mesh: Mesh,
        on_reply: Callable[[Demand, DemandNoted], None],
        on_refused: Callable[[Demand, ThawError], None],
    ) -> None:
        self._mesh = mesh
        self._on_reply = on_reply
        self._on_refused = on_refused
        self._next: dict[str, Demand] = {}
        self._sending: set[str] = set()
        self._has_next = asyncio.Event()

    def publish(self, demand: Demand) -> None:
        self._next[demand.model] = demand
        self._has_next.set()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._has_next.wait()
                self._has_next.clear()
                for model in self._next.keys() - self._sending:
                    self._sending.add(model)
                    group.create_task(self._send_all(model), name=f"demand {model}")

    async def _send_all(self, model: str) -> None:
        try:
            while (demand := self._next.pop(model, None)) is not None:
                await self._send(demand)
        finally:
            self._sending.discard(model)

    async def _send(self, demand: Demand) -> None:
        if demand.waiting and not self._mesh.is_connected:
            return  # it would be old on arrival; the dispatcher publishes again with the reconnection
        try:
            reply = await self._mesh.request(subjects.DEMAND, demand, DemandNoted)
        except Unreachable:
            log.info("no scheduler replies to demand; retrying", extra={"model": demand.model, "waiting": demand.waiting})
        except _PERMANENT as e:
            if demand.waiting:
                self._on_refused(demand, e)
        except ThawError as e:
            log.warning("scheduler refused demand", extra={"model": demand.model, "error": e.message})
        else:
            self._on_reply(demand, reply)
