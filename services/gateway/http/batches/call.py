"""One request of a batch, sent to the gateway's own application.

It takes the way of a client's request: limits, queues, metering, prices, failover and idempotency
are the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from services.gateway.authorization import acting_as
from services.gateway.domain.batches.pacing import BATCH_PRIORITY
from services.gateway.http.endpoints.inference import PRIORITY_HEADER
from services.gateway.http.parsing.idempotency_key import HEADER as IDEMPOTENCY_HEADER
from services.gateway.http.scopes import IS_OF_BATCH


@dataclass(frozen=True)
class CallResponse:
    """A whole response."""

    status: int
    headers: Headers
    body: bytes

    @property
    def retry_after_s(self) -> float | None:
        """The response's `retry-after` in seconds; None: it has none."""
        value = self.headers.get("retry-after", "")
        return float(value) if value.isdigit() else None


async def call(api: ASGIApp, path: str, body: bytes, key_hash: str, name: str, stop: asyncio.Event) -> CallResponse | None:
    """Send a request with the lowest priority.

    Args:
        key_hash: Digest of the API key that it belongs to; empty for none.
        name: Its Idempotency-Key, and the id that its trace has.
        stop: Ends the request like a client that disconnects.

    Returns:
        The response; None if the request was ended by `stop`.
    """
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-client-request-id": name,
        IDEMPOTENCY_HEADER: name,
        PRIORITY_HEADER.lower(): str(BATCH_PRIORITY),
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        "client": None,
        "server": None,
        IS_OF_BATCH: True,
    }
    start: Message = {}
    parts: list[bytes] = []
    unsent = [body]

    async def receive() -> Message:
        if unsent:
            return {"type": "http.request", "body": unsent.pop(), "more_body": False}
        await stop.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    with acting_as(key_hash):
        await api(scope, receive, send)
    if stop.is_set() or not start:
        return None
    return CallResponse(start["status"], Headers(raw=list(start["headers"])), b"".join(parts))
