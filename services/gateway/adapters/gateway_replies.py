"""Collection of the replies of all gateways of the mesh to one query."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from nats.errors import Error as NatsError
from pydantic import ValidationError

from shared.contracts.active_requests import RequestsViewed
from shared.contracts.base import Request
from shared.contracts.latencies import LatenciesViewed
from shared.messaging import Mesh

log = logging.getLogger(__name__)
QUIET_S = 0.25
"""Gateways do not know how many they are: after so long without a reply no more are expected."""
_MAX_GATEWAYS = 256
_R = TypeVar("_R", LatenciesViewed, RequestsViewed)


async def collect_replies(mesh: Mesh, subject: str, query: Request, own: _R) -> list[_R]:
    """Return the reply of each gateway, this one's first.

    Without NATS, and from gateways that do not reply in time, there is nothing.

    Args:
        subject: Every gateway subscribes to it.
        own: The reply of this gateway.
    """
    found = {own.gateway: own}
    try:
        async with asyncio.timeout(query.deadline_ms / 1e3):
            await _collect(mesh, subject, query, found, type(own))
    except (NatsError, TimeoutError):
        pass  # no reply within the quiet time is the regular end
    return list(found.values())


async def _collect(mesh: Mesh, subject: str, query: Request, found: dict[str, _R], kind: type[_R]) -> None:
    inbox = mesh.nc.new_inbox()
    replies = await mesh.nc.subscribe(inbox)
    try:
        await mesh.nc.publish(subject, query.model_dump_json().encode(), reply=inbox)
        while len(found) < _MAX_GATEWAYS:
            message = await replies.next_msg(timeout=QUIET_S)
            try:
                viewed = kind.model_validate_json(message.data)
            except ValidationError as e:
                log.warning("dropped a malformed message", extra={"subject": message.subject, "error": str(e)})
                continue
            found.setdefault(viewed.gateway, viewed)
    finally:
        await replies.unsubscribe()
