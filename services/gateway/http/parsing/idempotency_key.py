"""The Idempotency-Key header."""

from __future__ import annotations

import re
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.adapters.idempotency_store import digest
from services.gateway.authorization import Authorizer
from services.gateway.http.parsing.request_parser import ParsedRequest
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest
from shared.errors import InvalidRequest

HEADER = "idempotency-key"
_VALID = re.compile(r"[\x21-\x7e]{1,255}")


def idempotency_key_of(scope: Scope) -> str | None:
    """Hash the Idempotency-Key with API key and route; None without the header."""
    headers = Headers(scope=scope)
    header = headers.get(HEADER)
    if header is None:
        return None
    if not _VALID.fullmatch(header):
        raise InvalidRequest("Idempotency-Key must have 1 to 255 printable characters without spaces")
    return digest(Authorizer.key_hash(headers).encode(), scope["path"].encode(), header.encode())


def with_seed(parsed: ParsedRequest, key: str) -> ParsedRequest:
    """Give a stream without a seed one that is derived from its idempotency key.

    If its engine dies, another one then generates the same text, and the stream continues.
    """
    request = parsed.request
    if not isinstance(request, ChatCompletionRequest | CompletionRequest) or not request.stream or request.seed is not None:
        return parsed
    # JSON parsers take the last of equal names, so this also replaces a null.
    engine_request = parsed.engine_request
    body = b'%b,"seed":%d}' % (engine_request.body.rstrip().removesuffix(b"}"), int(key[:8], 16))
    return replace(parsed, engine_request=replace(engine_request, body=body))
