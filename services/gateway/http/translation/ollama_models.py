"""Models in the form of Ollama's API: the list, one model's properties, and the running ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from services.gateway.domain.route_table import Route
from services.gateway.http.translation.ollama_responses import timestamp
from shared.contracts.engines import EVERYTHING
from shared.contracts.models import ModelCard

API_VERSION = "0.33.0"
"""The version of Ollama whose API this is. Clients refuse servers that are older than they need."""
_NEVER_S = 100 * 365 * 86_400.0
_UNITS = (("B", 1e9, 1), ("M", 1e6, 2), ("K", 1e3, 2))
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def listed_model(card: ModelCard) -> dict[str, Any]:
    """Describe a model for GET /api/tags."""
    return {
        "name": card.name,
        "model": card.name,
        "modified_at": timestamp(card.created),
        "size": card.info.weights_bytes,
        "digest": _digest(card),
        "details": _details(card),
        "capabilities": _capabilities(card),
    }


def shown_model(card: ModelCard) -> dict[str, Any]:
    """Describe a model for POST /api/show.

    There is no Modelfile: its fields are empty.
    """
    family = card.info.model_type
    facts = {
        "general.architecture": family,
        "general.parameter_count": card.info.parameters,
        f"{family}.context_length": card.context_length,
    }
    if card.info.vocab_size:
        facts[f"{family}.vocab_size"] = card.info.vocab_size
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(card),
        "model_info": facts,
        "capabilities": _capabilities(card),
        "modified_at": timestamp(card.created),
    }


def running_model(card: ModelCard, routes: Iterable[Route], now: float, unix_now: float) -> dict[str, Any]:
    """Describe a model with instances for GET /api/ps.

    Args:
        routes: Its instances.
        now: The monotonic time.
        unix_now: The same moment as Unix time.
    """
    routes = list(routes)
    sizes = [r.status.memory.weights + r.status.memory.private + r.status.memory.kv for r in routes]
    on_gpu = [size for size, r in zip(sizes, routes, strict=True) if not all(d.startswith("cpu") for d in r.status.device_ids)]
    return {
        "name": card.name,
        "model": card.name,
        "size": sum(sizes),
        "digest": _digest(card),
        "details": _details(card),
        "expires_at": timestamp(unix_now + max((_remaining_s(card, r, now) for r in routes), default=0.0)),
        "size_vram": sum(on_gpu),
        "context_length": card.context_length,
    }


def pull_progress(card: ModelCard, completed_bytes: int, total_bytes: int) -> dict[str, Any]:
    """Describe the progress of a pull in a line of POST /api/pull."""
    digest = _digest(card)
    return {
        "status": f"pulling {digest[:12]}",
        "digest": f"sha256:{digest}",
        "total": total_bytes,
        "completed": min(completed_bytes, total_bytes),
    }


def format_count(count: int) -> str:
    """Format a number of parameters as Ollama does: 7.6B, 134.52M."""
    for unit, size, digits in _UNITS:
        if count >= size:
            return f"{count / size:.{digits}f}".rstrip("0").rstrip(".") + unit
    return str(count)


def _remaining_s(card: ModelCard, route: Route, now: float) -> float:
    """Compute how long an instance stays without further requests."""
    if card.spec.keep_alive < 0 or card.spec.pin:
        return _NEVER_S
    idle_s = now - route.idle_since if route.idle_since is not None else 0.0
    return max(0.0, card.spec.keep_alive - idle_s)


def _digest(card: ModelCard) -> str:
    """Return a digest that changes with the weights, of the length that clients expect."""
    return hashlib.sha256(card.info.revision.encode()).hexdigest()


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": card.spec.base or "",
        "format": "gguf" if card.spec.source.endswith(".gguf") else "safetensors",
        "family": card.info.model_type,
        "families": [card.info.model_type],
        "parameter_size": format_count(card.info.parameters),
        "quantization_level": _DTYPES.get(card.info.dtype, card.info.dtype.upper()),
        "context_length": card.context_length,
    }


def _capabilities(card: ModelCard) -> list[str]:
    if card.info.task == "embed":
        return ["embedding"]
    has_tools = bool(card.capabilities.honours & {EVERYTHING, "tool_choice"})
    return ["completion", "tools"] if has_tools else ["completion"]
