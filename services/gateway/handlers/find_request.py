"""`FindRequest`: look up a running request by the id that its client knows.

The gateway that serves the request replies; the others stay silent.
"""

from __future__ import annotations

import logging

from nats.aio.msg import Msg
from pydantic import ValidationError

from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.migration import FindRequest, RequestFound

log = logging.getLogger(__name__)


async def subscribe_find_request(gateway: Gateway) -> None:
    """Reply to `FindRequest` from now on."""

    async def find(message: Msg) -> None:
        try:
            query = FindRequest.model_validate_json(message.data)
        except ValidationError as e:
            log.warning("dropped a malformed message", extra={"subject": message.subject, "error": str(e)})
            return
        ticket = gateway.ticket_of(query.request_id)
        if ticket is not None:
            found = RequestFound(gateway_id=gateway.id, request_id=ticket.id, instance_id=ticket.instance_id, model=ticket.model)
            await message.respond(found.model_dump_json().encode())

    await gateway.mesh.nc.subscribe(subjects.FIND_REQUEST, cb=find)
