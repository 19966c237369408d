"""What can be asked without an engine: models, health, metrics, the API's description; and the answer for routes that nobody serves."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.http.edge import read_body
from services.gateway.http.errors import MethodNotAllowed, json_response
from services.gateway.http.openapi import POSTS, document
from services.gateway.http.parse import validated
from services.gateway.service import Gateway
from shared.contracts.models import ModelCard
from shared.errors import NotFound


class _AnyRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    model: str


def model_object(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "thaw",
        "context_length": card.context_length,
        "max_model_len": card.context_length,
        "aliases": list(card.spec.aliases),
        "task": card.info.task,
    }


class Info:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._started = time.monotonic()

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [model_object(c) for c in self._gateway.catalog.cards()]})

    async def model(self, request: Request) -> Response:
        return json_response(model_object(self._gateway.catalog.resolve(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok", "uptime_s": round(time.monotonic() - self._started, 1)})

    async def ready(self, request: Request) -> Response:
        """Ready: the mesh is there, what it knows has been read, and new requests are taken."""
        faults = self._gateway.faults()
        state = {"status": "ready" if not faults else "not ready", "faults": faults, "models": len(self._gateway.catalog)}
        return json_response(state, 503 if faults else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._gateway.recorder.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return json_response(document())

    async def elsewhere(self, request: Request) -> Response:
        """Any other route of the API whose body names a model: no engine declares one yet."""
        path = request.url.path
        if path in POSTS:
            raise MethodNotAllowed(f"Not allowed to {request.method} on {path}")
        if request.method != "POST":
            raise NotFound(f"Invalid URL ({request.method} {path})")
        body = await read_body(request.scope, request.receive, self._gateway.settings.max_body_bytes)
        card = self._gateway.catalog.resolve(validated(_AnyRequest, body).model)
        raise NotFound(f"The engine of {card.name} ({card.spec.engine}) does not serve {path}")
