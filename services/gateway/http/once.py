"""The Idempotency-Key header: one name for what a client means by it."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import Scope

from services.gateway.adapters.idempotency import digest
from services.gateway.http.keys import Keys
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
    return digest(Keys.of(headers.get("authorization")).encode(), scope["path"].encode(), given.encode())
