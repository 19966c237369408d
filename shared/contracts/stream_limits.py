"""Size limits of JetStream streams and buckets.

`docs/operations.md` lists them. nats-server reserves their sum, so its `max_file_store` must be
larger.
"""

from __future__ import annotations

from shared.contracts import subjects

MIB = 1024 * 1024
KEYED_REPLIES_BYTES = 256 * MIB
"""Default of THAW_IDEMPOTENCY_BYTES."""
MAX_BYTES = {
    subjects.TRACE_STREAM: 128 * MIB,
    subjects.KEYED_STREAM: KEYED_REPLIES_BYTES,
    subjects.CATALOG_BUCKET: 64 * MIB,
    subjects.KEYS_BUCKET: 16 * MIB,
    subjects.AUDIT_STREAM: 16 * MIB,
    subjects.IDEMPOTENCY_BUCKET: 256 * MIB,
    subjects.MIGRATIONS_BUCKET: 64 * MIB,
    subjects.CONSOLE_BUCKET: MIB,
    subjects.RESPONSES_BUCKET: 128 * MIB,
    subjects.BATCHES_BUCKET: 32 * MIB,
    subjects.FILES_BUCKET: 512 * MIB,
}
"""By stream or bucket."""
MAX_MEMORY_STORE_BYTES = 64 * MIB
"""Thaw keeps no stream in memory."""
_HEADROOM = 1.5


def max_file_store(keyed_replies_bytes: int = KEYED_REPLIES_BYTES) -> int:
    """Return nats-server's `max_file_store` in bytes.

    It leaves room for streams that an operator adds.
    """
    others = sum(MAX_BYTES.values()) - MAX_BYTES[subjects.KEYED_STREAM]
    return int((others + keyed_replies_bytes) * _HEADROOM)
