"""What a hosted engine is asked for a client's request."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpRequest, json_request
from services.enginehost.server.resume import resumed
from services.enginehost.server.token_tracker import Tracker, fixed_at
from shared.contracts.inference import InferRequest

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings"}


@dataclass(frozen=True)
class Asked:
    """`hide_usage`: what the engine tells of it in its stream is for us only. `tracker`: its tokens are followed; None: they cannot be, or need
    not be, and `fixed` says why."""

    outgoing: HttpRequest
    hide_usage: bool = False
    fixed: str = ""
    tracker: Tracker | None = None
    seed: int | None = None


async def asked_for(request: InferRequest, driver: Driver, client: Client) -> Asked:
    """Raises `Conflict` for an answer that this engine cannot go on with."""
    body, chat = request.body, request.endpoint == "chat"
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if request.resume is not None:
        known, outgoing, begun, prompt = await resumed(request, driver, client)
        tracker = Tracker(known, chat, hide_usage=not wants_usage, hide_ids=_hidden(known, body), begun=begun, prompt=prompt)
        return Asked(outgoing, tracker=tracker, seed=body.get("seed"))
    if request.endpoint == "other":
        return Asked(_other(request, driver), fixed="only its engine understands this route")
    fixed = fixed_at(driver, request.endpoint, body)
    outgoing_body = driver.body(body)
    hide = False
    if body.get("stream") and driver.stream_usage:
        hide = not wants_usage
        outgoing_body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    api = driver.tokens
    if fixed or api is None:
        return Asked(json_request(_PATHS[request.endpoint], outgoing_body), hide, fixed)
    prompt = () if api.tells_prompt else tuple(await api.prompt(body, driver.served_name, client, chat=chat))
    tracker = Tracker(api, chat, hide_usage=hide, hide_ids=_hidden(api, body), prompt=prompt)
    outgoing = json_request(_PATHS[request.endpoint], {**outgoing_body, **api.asked})
    return Asked(outgoing, hide, tracker=tracker, seed=body.get("seed"))


def _hidden(api: TokenApi, body: Mapping[str, Any]) -> bool:
    """Whether the client did not ask for what its engine is asked to tell."""
    return not any(body.get(name) for name in api.asked)


def _other(request: InferRequest, driver: Driver) -> HttpRequest:
    path = request.route + (f"?{request.query}" if request.query else "")
    if request.data is not None:
        headers = {**request.headers, "content-type": request.content_type}
        return HttpRequest(request.method, path, base64.b64decode(request.data), headers)
    if request.method in ("GET", "DELETE"):
        return HttpRequest(request.method, path, headers=request.headers)
    body: Any = driver.body(request.body)
    outgoing = json_request(path, body, request.method)
    return HttpRequest(outgoing.method, path, outgoing.body, {**request.headers, **outgoing.headers})
