"""Queries to instances about requests whose messages stopped arriving."""

from __future__ import annotations

import asyncio
import logging
import time

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.ticket import Ticket
from shared.contracts import subjects
from shared.contracts.migration import ListRequests, RequestsListed
from shared.errors import ThawError, Unreachable
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_DEADLINE_MS = 2_000


class RequestProbe:
    """Ask an instance whether it still serves a request.

    The final messages of a request may be lost, and an instance that serves others never reports
    itself idle. An instance that does not reply changes nothing: its node reports its death.
    """

    def __init__(self, mesh: Mesh, dispatcher: Dispatcher) -> None:
        self._mesh = mesh
        self._dispatcher = dispatcher
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ticket: Ticket) -> None:
        """Probe in the background; report a missing request to the dispatcher."""
        task = asyncio.create_task(self._probe(ticket, ticket.instance_id or "", ticket.attempt_id), name="request probe")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, ticket: Ticket, instance_id: str, attempt_id: str) -> None:
        try:
            query = ListRequests(deadline_ms=_DEADLINE_MS)
            listed = await self._mesh.request(subjects.engine_control(instance_id), query, RequestsListed)
        except ThawError as e:
            if isinstance(e, Unreachable):
                self._dispatcher.on_unprobed(ticket, attempt_id, time.monotonic())
            log.info("instance did not list its requests", extra={"instance": instance_id, "error": e.message})
            return
        if all(r.request_id != attempt_id for r in listed.requests):
            log.warning("instance no longer has the request", extra={"instance": instance_id, "attempt": attempt_id})
            self._dispatcher.on_missing(ticket, attempt_id, time.monotonic())
