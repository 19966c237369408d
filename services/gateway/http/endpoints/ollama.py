"""Ollama's API: requests are translated to OpenAI's, served like those, and translated back.

Whatever holds for OpenAI's API (keys, limits, queues, failover, metering) holds here. Management of
models has other commands, which its errors name.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.domain.admission import Reservation
from services.gateway.http.endpoints.inference import Inference
from services.gateway.http.endpoints.ollama_pull import OllamaPulls
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.responses.translated_send import TranslatedSend
from services.gateway.http.scopes import caller_of
from services.gateway.http.translation.ollama_models import API_VERSION, listed_model, running_model, shown_model
from services.gateway.http.translation.ollama_requests import OLLAMA_ROUTES, OllamaShow, served_name
from services.gateway.http.translation.ollama_responses import OllamaTranslator
from services.gateway.loop import Gateway
from shared.errors import InvalidRequest, NotFound, PayloadTooLarge

_MAX_SHOW_BYTES = 64 * 1024
_COMMANDS = {
    "create": "Register the model with `thaw models add NAME SOURCE`, or in thaw.yaml",
    "copy": "Give the model another name with `aliases` in thaw.yaml",
    "delete": "Remove the model with `thaw models rm NAME`",
    "push": "Thaw publishes no models",
    "blobs/{digest:path}": "Register the model with `thaw models add NAME SOURCE`, where SOURCE has its files",
}
"""Thaw's counterparts of Ollama's routes for the management of models."""


class OllamaInference(Inference):
    """The ASGI endpoint of chat, generation and embeddings in Ollama's form."""

    def __init__(self, gateway: Gateway, parsers: ParserProcess) -> None:
        super().__init__(gateway, "chat", parsers)

    async def infer(
        self, parsed: ParsedRequest, reservation: Reservation, arrived_at: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a parsed request, and translate its response."""
        limit = self.body_limit(scope)
        if len(parsed.engine_request.body) > limit:
            raise PayloadTooLarge(f"The body exceeds the limit of {limit} bytes in OpenAI's form. Send a smaller one")
        assert parsed.ollama is not None
        translated = TranslatedSend(send, OllamaTranslator(parsed.ollama, arrived_at))
        await super().infer(parsed, reservation, arrived_at, scope, receive, translated)


class Ollama:
    """Ollama's routes."""

    def __init__(self, gateway: Gateway, parsers: ParserProcess) -> None:
        self._gateway = gateway
        self._parsers = parsers

    def routes(self) -> list[Route]:
        inference = OllamaInference(self._gateway, self._parsers)
        return [
            *(Route(path, inference, methods=["POST"]) for path in OLLAMA_ROUTES),
            Route("/", self.report_running, methods=["GET"]),
            Route("/api/version", self.version, methods=["GET"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/ps", self.running, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            *OllamaPulls(self._gateway).routes(),
            *(Route(f"/api/{path}", self.refuse, methods=["GET", "POST", "DELETE"]) for path in _COMMANDS),
        ]

    async def report_running(self, request: Request) -> Response:
        """Answer clients that look for an Ollama."""
        return PlainTextResponse("Ollama is running")

    async def version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION})

    async def tags(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        return json_response({"models": [listed_model(c) for c in self._gateway.catalog.cards() if caller.may_use(c)]})

    async def running(self, request: Request) -> Response:
        caller, routes = caller_of(request.scope), self._gateway.dispatcher.routes
        now, unix_now = time.monotonic(), time.time()
        models = []
        for card in self._gateway.catalog.cards():
            ready = [r for r in routes.iter_routes(card.name) if r.is_ready]
            if ready and caller.may_use(card):
                models.append(running_model(card, ready, now, unix_now))
        return json_response({"models": models})

    async def show(self, request: Request) -> Response:
        body = validate_body(OllamaShow, await read_body(request.scope, request.receive, _MAX_SHOW_BYTES))
        name = body.model or body.name
        if not name:
            raise InvalidRequest("Missing required parameter: 'model'.", param="model")
        await self._gateway.readiness.await_model(served_name(name))
        card = self._gateway.catalog.find_model(served_name(name))
        if not caller_of(request.scope).may_use(card):
            raise await self._gateway.readiness.hide_model(name)
        return json_response(shown_model(card))

    async def refuse(self, request: Request) -> Response:
        """Name the command that does what Ollama's route does."""
        work = request.url.path.removeprefix("/api/").partition("/")[0]
        advice = next(text for path, text in _COMMANDS.items() if path.partition("/")[0] == work)
        raise NotFound(f"Thaw does not serve {request.url.path}. {advice}")
