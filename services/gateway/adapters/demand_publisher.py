"""Tells the scheduler what waits: the newest level of each model, one request at a time for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.contracts import subjects
from shared.contracts.demand import Demand, DemandNoted
from shared.errors import InsufficientMemory, InvalidModel, ModelNotFound, ThawError, Unreachable
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_HOPELESS = (InvalidModel, InsufficientMemory, ModelNotFound)
"""Answers after which waiting longer cannot help."""


class DemandSender:
    """Demand is a level: what has not been sent yet is replaced by what is newer. Failures are not repeated here, the next tick is."""

    def __init__(
        self,
        mesh: Mesh,
        on_noted: Callable[[Demand, DemandNoted], None],
        on_hopeless: Callable[[Demand, ThawError], None],
    ) -> None:
        self._mesh = mesh
        self._on_noted = on_noted
        self._on_hopeless = on_hopeless
        self._next: dict[str, Demand] = {}
        self._busy: set[str] = set()
        self._wanted = asyncio.Event()

    def tell(self, demand: Demand) -> None:
        self._next[demand.model] = demand
        self._wanted.set()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                for model in self._next.keys() - self._busy:
                    self._busy.add(model)
                    group.create_task(self._send_all(model), name=f"demand {model}")

    async def _send_all(self, model: str) -> None:
        try:
            while (demand := self._next.pop(model, None)) is not None:
                await self._send(demand)
        finally:
            self._busy.discard(model)

    async def _send(self, demand: Demand) -> None:
        try:
            noted = await self._mesh.request(subjects.DEMAND, demand, DemandNoted)
        except Unreachable:
            log.info("no scheduler answers; asking again", extra={"model": demand.model, "waiting": demand.waiting})
        except _HOPELESS as e:
            if demand.waiting:
                self._on_hopeless(demand, e)
        except ThawError as e:
            log.warning("the scheduler did not take the demand", extra={"model": demand.model, "error": e.message})
        else:
            self._on_noted(demand, noted)
