"""Salts that give each API key a prefix cache of its own.

Engines reuse the keys and values of a prompt's prefix for later requests. The time to the first
token and `cached_tokens` then reveal whether another key sent the same prefix. An engine that salts
its cache finds only prefixes that were stored with the salt of the request.
"""

from __future__ import annotations

import hashlib
from typing import Any

from services.enginehost.drivers.port import Driver
from shared.contracts.inference import InferRequest

CACHE_SALT = "cache_salt"
"""Request field of vLLM (since 0.9) and SGLang."""


def cache_salt(flow: str, given: Any) -> Any:
    """Return the salt of a request.

    The client's own salt divides the cache of its key further. It cannot name another key's part,
    because it is hashed together with the key.

    Args:
        flow: Id of the API key; empty for no key.
        given: `cache_salt` of the client's request. A value that is not a text is returned as it
            is: the engine rejects it.
    """
    if not flow or not (given is None or (isinstance(given, str) and given)):
        return given
    return hashlib.sha256(b"thaw cache salt\0" + flow.encode() + b"\0" + (given or "").encode()).hexdigest()


def cache_fields(request: InferRequest, driver: Driver) -> dict[str, Any]:
    """Return the request fields that choose the part of the engine's prefix cache."""
    salt = cache_salt(request.share.flow, request.body.get(CACHE_SALT)) if driver.salts_prefixes else None
    return {} if salt is None else {CACHE_SALT: salt}
