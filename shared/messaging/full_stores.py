"""Recognize a full JetStream stream or bucket, and raise the error for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nats.js.errors import APIError

from shared.errors import StoreFull

_STORE_FAILED = 10077
NO_STORAGE = (10023, 10047)


@contextmanager
def full_as(message: str) -> Iterator[None]:
    """Raise `StoreFull(message)` if JetStream refuses a write to a full bucket."""
    try:
        yield
    except APIError as e:
        if is_full(e):
            raise StoreFull(message) from e
        raise


def is_full(error: APIError) -> bool:
    """True if the store has no room for what was written."""
    code = getattr(error, "err_code", None)  # nats-py makes its errors about keys without one
    return code in NO_STORAGE or (code == _STORE_FAILED and "maximum bytes" in (error.description or ""))
