"""`ViewRequests`: every gateway replies with the requests that it serves."""

from __future__ import annotations

import logging

from nats.aio.msg import Msg
from pydantic import ValidationError

from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.active_requests import ViewRequests

log = logging.getLogger(__name__)


async def subscribe_view_requests(gateway: Gateway) -> None:
    """Reply to `ViewRequests` from now on."""

    async def view(message: Msg) -> None:
        try:
            ViewRequests.model_validate_json(message.data)
        except ValidationError as e:
            log.warning("dropped a malformed message", extra={"subject": message.subject, "error": str(e)})
            return
        await message.respond(gateway.view_requests().model_dump_json().encode())

    await gateway.mesh.nc.subscribe(subjects.VIEW_REQUESTS, cb=view)
