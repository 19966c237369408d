"""The Idempotency-Key header: one name for what a client means by it, and a request that comes out the same when it is run again."""

from __future__ import annotations

import re
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.adapters.idempotency_store import digest
from services.gateway.authorization import Keys
from services.gateway.http.parsing.request_parser import Parsed
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest
from shared.errors import InvalidRequest

HEADER = "idempotency-key"
_VALID = re.compile(r"[\x21-\x7e]{1,255}")


def key_of(scope: Scope) -> str | None:
    """The name of the request's Idempotency-Key, other for each API key and route; None without one."""
    headers = Headers(scope=scope)
    given = headers.get(HEADER)
    if given is None:
        return None
    if not _VALID.fullmatch(given):
        raise InvalidRequest("Idempotency-Key must be 1 to 255 printable characters")
    return digest(Keys.of(headers).encode(), scope["path"].encode(), given.encode())


def repeatable(parsed: Parsed, name: str) -> Parsed:
    """A stream that was to be sampled without a seed gets one, made of its key: should its engine die midway, another generates the same
    and the stream goes on."""
    request = parsed.request
    if not isinstance(request, ChatCompletionRequest | CompletionRequest) or not request.stream or request.seed is not None:
        return parsed
    # The last of several equal names counts, so this also replaces a null.
    body = b'%b,"seed":%d}' % (parsed.ask.body.rstrip().removesuffix(b"}"), int(name[:8], 16))
    return replace(parsed, ask=replace(parsed.ask, body=body))
