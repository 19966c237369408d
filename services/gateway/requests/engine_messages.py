"""What engines' messages say, as they come off the wire."""

from __future__ import annotations

from typing import Any

from shared.contracts.inference import RESUME, Answered, EmbeddingsFinished, InferEnd, InferFinished, InferRaw
from shared.contracts.phases import PhaseSpan
from shared.errors import Conflict

_LAST: dict[str, type[Answered]] = {"finished": InferFinished, "embeddings": EmbeddingsFinished, "raw": InferRaw, "end": InferEnd}


def last_of(message: dict[str, Any]) -> Answered:
    """The message that ends an answer. Raises `KeyError` for any other."""
    return _LAST[message["kind"]].model_validate(message)


def phases_of(message: dict[str, Any]) -> tuple[PhaseSpan, ...]:
    return tuple(PhaseSpan.model_validate(p) for p in message.get("phases") or ())


def repeated(message: dict[str, Any]) -> bool:
    """Whether an engine says that it is at this request already: it was asked twice, to be sure."""
    if message["kind"] != "failed":
        return False
    return bool(message["error"]["code"] == Conflict.code and message["error"].get("param") != RESUME)
