"""Collection of a model's latencies from all gateways of the mesh."""

from __future__ import annotations

import asyncio
import logging

from nats.errors import Error as NatsError
from pydantic import ValidationError

from shared.contracts import subjects
from shared.contracts.latencies import LatenciesViewed, ViewLatencies
from shared.messaging import Mesh

log = logging.getLogger(__name__)
QUIET_S = 0.25
"""Gateways do not know how many they are: after so long without a reply no more are expected."""
_MAX_GATEWAYS = 256


async def collect_latencies(mesh: Mesh, own: LatenciesViewed, model: str) -> list[LatenciesViewed]:
    """Return what each gateway has of a model.

    Without NATS, and from gateways that do not reply in time, there is nothing.

    Args:
        own: What this gateway has.
    """
    found = {own.gateway: own}
    query = ViewLatencies(model=model)
    try:
        async with asyncio.timeout(query.deadline_ms / 1e3):
            await _collect(mesh, query, found)
    except (NatsError, TimeoutError):
        pass  # no reply within the quiet time is the regular end
    return list(found.values())


async def _collect(mesh: Mesh, query: ViewLatencies, found: dict[str, LatenciesViewed]) -> None:
    inbox = mesh.nc.new_inbox()
    replies = await mesh.nc.subscribe(inbox)
    try:
        await mesh.nc.publish(subjects.VIEW_LATENCIES, query.model_dump_json().encode(), reply=inbox)
        while len(found) < _MAX_GATEWAYS:
            message = await replies.next_msg(timeout=QUIET_S)
            try:
                viewed = LatenciesViewed.model_validate_json(message.data)
            except ValidationError as e:
                log.warning("dropped a malformed message", extra={"subject": message.subject, "error": str(e)})
                continue
            found.setdefault(viewed.gateway, viewed)
    finally:
        await replies.unsubscribe()
