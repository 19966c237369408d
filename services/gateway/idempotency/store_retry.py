"""Retries of operations on the store of idempotency keys, which outlast a restart of NATS."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.gateway.adapters.idempotency_store import is_store_unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
_STORE_RETRY_TIMEOUT_S, _STORE_RETRY_S = 60.0, 0.5
_QUICK_FAILURE_S = 10.0
"""An attempt that fails within it did not find the store at work; longer than the time-out of any
call of the store.
"""


async def retry_store(operation: Callable[[], Awaitable[T]]) -> T:
    """Repeat `operation` while the store is unavailable, as during a restart of NATS.

    Gives up after `_STORE_RETRY_TIMEOUT_S` of attempts that fail quickly, and raises what
    `operation` raises. An attempt that lasted longer, like following a response for a minute,
    found the store at work: the time begins again.
    """
    until = time.monotonic() + _STORE_RETRY_TIMEOUT_S
    while True:
        began = time.monotonic()
        try:
            return await operation()
        except Exception as e:
            now = time.monotonic()
            if now - began > _QUICK_FAILURE_S:
                until = now + _STORE_RETRY_TIMEOUT_S
            if not is_store_unavailable(e) or now > until:
                raise
            log.info("idempotency store is unavailable; retrying", extra={"error": repr(e)})
        await asyncio.sleep(_STORE_RETRY_S)
