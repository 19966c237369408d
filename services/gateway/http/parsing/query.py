"""Parse parameters of a query string."""

from __future__ import annotations

from starlette.requests import Request

from shared.errors import InvalidRequest


def read_integer(request: Request, name: str, default: int, *, minimum: int = 1, maximum: int) -> int:
    """Return a parameter of the query. Raises `InvalidRequest` if it is out of range."""
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 20) or not minimum <= int(value) <= maximum:
        raise InvalidRequest(f"{name}={value!r} is not an integer from {minimum} to {maximum}", param=name)
    return int(value)
