"""Translates a client's request into a request to the hosted engine."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.enginehost.drivers.cache_salt import CACHE_SALT, cache_fields
from services.enginehost.drivers.port import Driver
from services.enginehost.drivers.token_api import TokenApi
from services.enginehost.http1 import Client, HttpRequest, json_request
from services.enginehost.server.resume import build_request
from services.enginehost.server.token_tracker import TokenTracker, not_resumable_reason
from shared.contracts.inference import InferRequest

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings"}


@dataclass(frozen=True)
class UpstreamRequest:
    """A request to the engine.

    Args:
        outgoing: The HTTP request.
        hide_usage: The usage in the engine's stream is not for the client.
        fixed: The reason why another engine cannot resume the response; empty if it can.
        tracker: Tracks the tokens of the response; None if they are not tracked.
        seed: Seed of the request, if it has one.
        salt: The part of the prefix cache that it uses; empty: no salt.
    """

    outgoing: HttpRequest
    hide_usage: bool = False
    fixed: str = ""
    tracker: TokenTracker | None = None
    seed: int | None = None
    salt: str = ""


async def build_upstream_request(request: InferRequest, driver: Driver, client: Client) -> UpstreamRequest:
    """Translate a request.

    Raises `Conflict` for a response that this engine cannot resume.
    """
    body, chat = request.body, request.endpoint == "chat"
    salt = cache_fields(request, driver).get(CACHE_SALT, "")
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if request.resume is not None:
        known, outgoing, resume_state, prompt = await build_request(request, driver, client)
        tracker = TokenTracker(
            known, chat, hide_usage=not wants_usage, hide_ids=_hides_ids(known, body), resume_state=resume_state, prompt=prompt
        )
        return UpstreamRequest(outgoing, tracker=tracker, seed=body.get("seed"), salt=salt)
    if request.endpoint == "other":
        return UpstreamRequest(_forward(request, driver), fixed="only its engine understands this route")
    fixed = not_resumable_reason(driver, request.endpoint, body)
    outgoing_body = {**driver.body(body, request.adapter), **driver.share_fields(request.share), **cache_fields(request, driver)}
    hide = False
    if body.get("stream") and driver.stream_usage:
        hide = not wants_usage
        outgoing_body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    api = driver.tokens
    if fixed or api is None:
        return UpstreamRequest(json_request(_PATHS[request.endpoint], outgoing_body), hide, fixed)
    prompt = () if api.includes_prompt_ids else tuple(await api.prompt(body, driver.name_of(request.adapter), client, chat=chat))
    tracker = TokenTracker(api, chat, hide_usage=hide, hide_ids=_hides_ids(api, body), prompt=prompt)
    outgoing = json_request(_PATHS[request.endpoint], {**outgoing_body, **api.request_fields})
    return UpstreamRequest(outgoing, hide, tracker=tracker, seed=body.get("seed"), salt=salt)


def _hides_ids(api: TokenApi, body: Mapping[str, Any]) -> bool:
    """True if the client did not request the token ids that the host requests."""
    return not any(body.get(name) for name in api.request_fields)


def _forward(request: InferRequest, driver: Driver) -> HttpRequest:
    path = request.route + (f"?{request.query}" if request.query else "")
    if request.data is not None:
        headers = {**request.headers, "content-type": request.content_type}
        return HttpRequest(request.method, path, base64.b64decode(request.data), headers)
    if request.held is not None and not request.held.marker:
        return HttpRequest(request.method, path, headers={**request.headers, "content-type": request.content_type})
    if request.method in ("GET", "DELETE"):
        return HttpRequest(request.method, path, headers=request.headers)
    body: Any = {
        **driver.body(request.body, request.adapter),
        **driver.share_fields(request.share),
        **cache_fields(request, driver),
    }
    outgoing = json_request(path, body, request.method)
    return HttpRequest(outgoing.method, path, outgoing.body, {**request.headers, **outgoing.headers})
