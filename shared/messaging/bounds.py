"""Define the size limits of JetStream streams and buckets.

The module also makes the error for a full bucket. `docs/operations.md` lists these limits.
nats-server reserves their sum, so its `max_file_store` must be larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nats.js.errors import APIError

from shared.contracts import subjects
from shared.errors import StoreFull

MIB = 1024 * 1024
KEYED_REPLIES_BYTES = 256 * MIB
"""Default of THAW_IDEMPOTENCY_BYTES."""
MAX_BYTES = {
    subjects.TRACE_STREAM: 128 * MIB,
    subjects.KEYED_STREAM: KEYED_REPLIES_BYTES,
    subjects.CATALOG_BUCKET: 64 * MIB,
    subjects.KEYS_BUCKET: 16 * MIB,
    subjects.IDEMPOTENCY_BUCKET: 256 * MIB,
    subjects.MIGRATIONS_BUCKET: 64 * MIB,
}
"""By stream or bucket."""
MAX_MEMORY_STORE_BYTES = 64 * MIB
"""Thaw keeps no stream in memory."""
_HEADROOM = 1.5
_STORE_FAILED = 10077
NO_STORAGE = (10023, 10047)


def max_file_store(keyed_replies_bytes: int = KEYED_REPLIES_BYTES) -> int:
    """Return nats-server's `max_file_store` in bytes.

    It leaves room for streams that an operator adds.
    """
    others = sum(MAX_BYTES.values()) - MAX_BYTES[subjects.KEYED_STREAM]
    return int((others + keyed_replies_bytes) * _HEADROOM)


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
