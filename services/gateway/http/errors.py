"""HTTP responses for errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.gateway.http.error_formats import ErrorFormat
from shared.compact_json import encode_json
from shared.errors import InvalidRequest, MethodNotAllowed, NotFound, QueueFull, RateLimitExceeded, ThawError


def error_headers(error: ThawError) -> dict[str, str]:
    """Build the headers of an error: retry, queue position, authentication."""
    headers: dict[str, str] = {}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if isinstance(error, QueueFull) and error.position is not None:
        headers["x-thaw-queue-position"] = str(error.position)
    if isinstance(error, RateLimitExceeded) and error.headers is not None:
        headers |= error.headers
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        # The rest of the body is still on its way, and is not read.
        headers["connection"] = "close"
    return headers


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Build a compact JSON response."""
    return Response(encode_json(data), status, dict(headers or {}), "application/json")


def error_response(error: ThawError, error_format: ErrorFormat) -> Response:
    """Build the response for an error."""
    return json_response(error_format.body(error), error.status, error_headers(error))


def from_http_exception(error: HTTPException, method: str, path: str) -> ThawError:
    """Convert an exception of Starlette's router."""
    if error.status_code == 404:
        return NotFound(f"Invalid URL ({method} {path})")
    if error.status_code == 405:
        return MethodNotAllowed(f"Not allowed to {method} on {path}")
    return InvalidRequest(str(error.detail))
