"""Which requests may have a body that exceeds a NATS message."""

from __future__ import annotations

from typing import Any

from services.gateway.domain.engine_request import EngineRequest
from shared.compact_json import encode_json
from shared.contracts.inference import Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest
from shared.errors import PayloadTooLarge


def too_large(limit: int) -> PayloadTooLarge:
    """Return the error for a body that exceeds `limit` bytes."""
    return PayloadTooLarge(f"The body exceeds the limit of {limit} bytes. Send a smaller one")


def can_hold_body(endpoint: Endpoint, card: ModelCard) -> bool:
    """True if the engine's host reads bodies from a gateway.

    The builtin engine generates from text, which fits a message.
    """
    return endpoint in ("chat", "other") and card.capabilities.passes_through


def check_held(request: Any, engine_request: EngineRequest, card: ModelCard, limit: int) -> None:
    """Check that a body that exceeds a message may go to the model's engine.

    In a chat only media may be that long: parts of a message's content that are not text.

    Args:
        request: The validated request, as its outline has it.
        limit: Maximum bytes of other bodies.

    Raises:
        PayloadTooLarge: It may not.
    """
    held = engine_request.held
    if held is None:
        return
    if not can_hold_body(engine_request.endpoint, card):
        raise too_large(limit)
    if isinstance(request, ChatCompletionRequest):
        # A translated chat might lack a marker, or have it twice.
        counts = {_markers_in_media(request, held.marker), engine_request.body.count(held.marker.encode()), len(held.pieces)}
        if len(counts) > 1:
            raise too_large(limit)


def _markers_in_media(request: ChatCompletionRequest, marker: str) -> int:
    contents = (m.content for m in request.messages if isinstance(m.content, list))
    parts = (part for content in contents for part in content if part.get("type") != "text")
    return sum(encode_json(part).count(marker.encode()) for part in parts)
