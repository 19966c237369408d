"""Asking an instance whether it has a request still: its last words may have been lost, and while it serves others it is never idle."""

from __future__ import annotations

import asyncio
import logging
import time

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from shared.contracts import subjects
from shared.contracts.migration import ListRequests, RequestsListed
from shared.errors import ThawError
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_WITHIN_MS = 2_000


class Inquiries:
    """One question for each request that is in doubt. No answer is no reason to act: whether the instance lives is for its node to say."""

    def __init__(self, mesh: Mesh, dispatcher: Dispatcher) -> None:
        self._mesh = mesh
        self._dispatcher = dispatcher
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, ticket: Ticket) -> None:
        task = asyncio.create_task(self._ask(ticket, ticket.instance_id or "", ticket.attempt_id), name="inquiry")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, ticket: Ticket, instance_id: str, attempt_id: str) -> None:
        try:
            asked = ListRequests(deadline_ms=_WITHIN_MS)
            listed = await self._mesh.request(subjects.engine_control(instance_id), asked, RequestsListed)
        except ThawError as e:
            log.info("an instance does not tell what it serves", extra={"instance": instance_id, "error": e.message})
            return
        if all(r.request_id != attempt_id for r in listed.requests):
            log.warning("an instance has no such request", extra={"instance": instance_id, "attempt": attempt_id})
            self._dispatcher.on_missing(ticket, attempt_id, time.monotonic())
