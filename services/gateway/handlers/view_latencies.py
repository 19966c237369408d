"""`ViewLatencies`: every gateway replies with its latencies of a model."""

from __future__ import annotations

import logging

from nats.aio.msg import Msg
from pydantic import ValidationError

from services.gateway.loop import Gateway
from shared.contracts import subjects
from shared.contracts.latencies import ViewLatencies

log = logging.getLogger(__name__)


async def subscribe_view_latencies(gateway: Gateway) -> None:
    """Reply to `ViewLatencies` from now on."""

    async def view(message: Msg) -> None:
        try:
            query = ViewLatencies.model_validate_json(message.data)
        except ValidationError as e:
            log.warning("dropped a malformed message", extra={"subject": message.subject, "error": str(e)})
            return
        await message.respond(gateway.view_latencies(query.model).model_dump_json().encode())

    await gateway.mesh.nc.subscribe(subjects.VIEW_LATENCIES, cb=view)
