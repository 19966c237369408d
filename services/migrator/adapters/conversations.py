"""Requests to engines and gateways over NATS."""

from __future__ import annotations

import logging

from services.migrator.domain.events import Ask, Forget
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.migration import (
    ListRequests,
    MoveRequest,
    PrepareResume,
    ReadTokens,
    RequestMoved,
    RequestsListed,
    ResumePrepared,
    TokensRead,
)
from shared.errors import ThawError
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_REPLIES: dict[type[Message], type[Message]] = {
    ListRequests: RequestsListed,
    ReadTokens: TokensRead,
    PrepareResume: ResumePrepared,
    MoveRequest: RequestMoved,
}


class NatsConversations:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def ask(self, ask: Ask) -> Message:
        subject = subjects.engine_control(ask.address) if ask.to == "engine" else subjects.gateway_control(ask.address)
        return await self._mesh.request(subject, ask.message, _REPLIES[type(ask.message)])

    async def forget(self, forget: Forget) -> None:
        try:
            await self._mesh.request(subjects.engine_control(forget.instance_id), forget.message, Done)
        except ThawError as e:
            # The destination drops unused resume state by itself after `keep_ms`.
            log.info("failed to drop resume state at a destination", extra={"error": e.message})
