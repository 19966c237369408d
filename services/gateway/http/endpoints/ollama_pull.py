"""Ollama's /api/pull: download a registered model to a node's disk, with lines of progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.gateway.http.endpoints.admin import ask_scheduler
from services.gateway.http.endpoints.model_pulls import ask_pull
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute
from services.gateway.http.translation.ollama_models import pull_progress
from services.gateway.http.translation.ollama_requests import OllamaPull, served_name
from services.gateway.loop import Gateway
from shared.compact_json import encode_json
from shared.contracts.admin import ClusterView, ModelPulled, PullOptions, PullView, ViewCluster
from shared.contracts.models import ModelCard
from shared.errors import InvalidRequest, ModelNotFound, NotFound, ShuttingDown, ThawError

OLLAMA_PULL = "/api/pull"
_MAX_BODY = 64 * 1024
_INTERVAL_S = 1.0
"""Seconds between lines of progress."""
_SUCCESS = {"status": "success"}


class OllamaPulls:
    """The route of pulls, which change the cluster: it needs an admin key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[ScopedRoute]:
        return [ScopedRoute(OLLAMA_PULL, self.pull, methods=["POST"], needs="admin")]

    async def pull(self, request: Request) -> Response:
        """Pull a model to the disk of the node that the scheduler chooses.

        The pull continues after the client has disconnected.
        """
        body = validate_body(OllamaPull, await read_body(request.scope, request.receive, _MAX_BODY))
        name = body.model or body.name
        if not name:
            raise InvalidRequest("Missing required parameter: 'model'.", param="model")
        try:
            card = self._gateway.catalog.find_model(served_name(name))
        except ModelNotFound as e:
            raise NotFound(f"No model {name!r} is registered. Register it with `thaw models add NAME SOURCE`", param="model") from e
        if body.stream:
            return StreamingResponse(self._stream(card), media_type="application/x-ndjson")
        await self._pull(card)
        return json_response(_SUCCESS)

    async def _pull(self, card: ModelCard) -> ModelPulled | None:
        """Return when a node's disk has the model; a local directory is there already."""
        if "://" not in card.info.source:
            return None
        return await ask_pull(self._gateway, card.name, PullOptions(tier="ssd"))

    async def _stream(self, card: ModelCard) -> AsyncIterator[bytes]:
        reply = asyncio.create_task(self._pull(card), name=f"pull {card.name}")
        closing = asyncio.create_task(self._gateway.closing.wait(), name="closing")
        waits: set[asyncio.Task[Any]] = {reply, closing}
        last: dict[str, Any] = {}
        try:
            yield _line({"status": "pulling manifest"})
            while not reply.done():
                await asyncio.wait(waits, timeout=_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                if closing.done() and not reply.done():
                    raise ShuttingDown
                if not reply.done() and (found := await self._find(card)) is not None:
                    progress = pull_progress(card, found.loaded_bytes, found.total_bytes)
                    if progress != last:
                        yield _line(progress)
                    last = progress
            pulled = reply.result()
            nbytes = pulled.nbytes if pulled is not None else card.info.weights_bytes
            yield _line(pull_progress(card, nbytes, nbytes))
            yield _line(_SUCCESS)
        except ThawError as e:
            yield _line({"error": e.message})
        finally:
            # Not awaited: a client that has left cancels whatever this task waits for.
            reply.cancel()
            closing.cancel()

    async def _find(self, card: ModelCard) -> PullView | None:
        """Return the pull of the model in progress; None: there is none, or no leader."""
        try:
            view = await ask_scheduler(self._gateway, ViewCluster(brief=True), ClusterView)
        except ThawError:
            return None
        return next((p for p in view.pulls if p.model == card.name and p.tier == "ssd"), None)


def _line(value: dict[str, Any]) -> bytes:
    return encode_json(value) + b"\n"
