"""Routes without inference: models, health, metrics, and the API's description."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.endpoints.openapi import POSTS, document
from services.gateway.http.errors import json_response
from services.gateway.http.scopes import caller_of
from services.gateway.loop import Gateway
from shared.contracts.models import ModelCard
from shared.errors import MethodNotAllowed, NotFound


def model_object(card: ModelCard) -> dict[str, Any]:
    """Describe a model as OpenAI's API does.

    Returns:
        The fields of OpenAI and those of Thaw. `root` is the model's source; `parent` is the base
        model of a LoRA adapter.
    """
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "thaw",
        "context_length": card.context_length,
        "max_model_len": card.context_length,
        "aliases": list(card.spec.aliases),
        "task": card.info.task,
        "root": card.spec.public_source,
        "parent": card.spec.base,
    }


class Info:
    """Handlers that need no engine."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = time.monotonic()

    async def models(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        cards = [model_object(c) for c in self._gateway.catalog.cards() if caller.may_use(c)]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._gateway.readiness.await_model(name)
        card = self._gateway.catalog.find_model(name)
        if not caller_of(request.scope).may_use(card):
            raise await self._gateway.readiness.hide_model(name)
        return json_response(model_object(card))

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok", "uptime_s": round(time.monotonic() - self._started, 1)})

    async def report_ready(self, request: Request) -> Response:
        """Report whether new requests are accepted."""
        faults = self._gateway.readiness.not_ready_reasons()
        state = {"status": "ready" if not faults else "not ready", "faults": faults, "models": len(self._gateway.catalog)}
        return json_response(state, 503 if faults else 200)

    async def metrics(self, request: Request) -> Response:
        text, content_type = self._gateway.render_metrics(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    async def openapi(self, request: Request) -> Response:
        return json_response(document())

    async def unknown_route(self, request: Request) -> Response:
        """Refuse any other route; a POST goes to `Inference`."""
        path = request.url.path
        if path in POSTS:
            raise MethodNotAllowed(f"Not allowed to {request.method} on {path}")
        raise NotFound(f"Invalid URL ({request.method} {path})")
