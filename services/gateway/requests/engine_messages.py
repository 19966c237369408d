"""Helpers for messages of engines, as decoded from the wire."""

from __future__ import annotations

from typing import Any

from shared.contracts.inference import (
    RESUME,
    Answered,
    EmbeddingsFinished,
    InferEnd,
    InferFinished,
    InferRaw,
)
from shared.contracts.phases import PhaseSpan
from shared.errors import Conflict, InstanceDraining

_FINAL: dict[str, type[Answered]] = {
    "finished": InferFinished,
    "embeddings": EmbeddingsFinished,
    "raw": InferRaw,
    "end": InferEnd,
}


def parse_final(message: dict[str, Any]) -> Answered:
    """Parse the message that completes a response; `KeyError` for other kinds."""
    return _FINAL[message["kind"]].model_validate(message)


def phases_of(message: dict[str, Any]) -> tuple[PhaseSpan, ...]:
    """Parse the phases that a message carries."""
    return tuple(PhaseSpan.model_validate(p) for p in message.get("phases") or ())


def ends_attempt(message: dict[str, Any]) -> bool:
    """True if the message ends an attempt, and another instance continues the response."""
    if message["kind"] == "failed":
        return message.get("engine_lost") is True or bool(message["error"]["code"] == InstanceDraining.code)
    return bool(message["kind"] == "yielded")


def is_duplicate_refusal(message: dict[str, Any]) -> bool:
    """True if an engine refuses the request because it serves it already."""
    if message["kind"] != "failed":
        return False
    return bool(message["error"]["code"] == Conflict.code and message["error"].get("param") != RESUME)
