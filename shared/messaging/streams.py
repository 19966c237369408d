"""JetStream streams and buckets: each made where it is first needed, the same everywhere."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StoreCompression, StreamConfig
from nats.js.errors import BadRequestError
from nats.js.kv import KeyValue

from shared.contracts import subjects
from shared.contracts.migration import MIGRATION_KEPT_S
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT

_NAME_IN_USE = 10058


async def ensure_trace_stream(js: JetStreamContext) -> None:
    """Make the stream of traces, bounded by age and count, unless it is there. Safe to call from several processes at once."""
    config = StreamConfig(
        name=subjects.TRACE_STREAM,
        subjects=[subjects.TRACE_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=TRACE_MAX_AGE_S,
        max_msgs=TRACE_MAX_COUNT,
        allow_direct=True,
    )
    await _stream(js, config)


async def ensure_keyed_stream(js: JetStreamContext, max_age_s: float, max_bytes: int) -> None:
    """Make the stream of what engines say to requests with an Idempotency-Key: the oldest goes first beyond `max_bytes`."""
    config = StreamConfig(
        name=subjects.KEYED_STREAM,
        subjects=[subjects.KEYED_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        compression=StoreCompression.S2,
        discard=DiscardPolicy.OLD,
        max_age=max_age_s,
        max_bytes=max_bytes,
        allow_direct=True,
    )
    await _stream(js, config)


async def _stream(js: JetStreamContext, config: StreamConfig) -> None:
    try:
        await js.add_stream(config)
    except BadRequestError as e:
        if e.err_code != _NAME_IN_USE:
            raise
        await js.update_stream(config)


async def catalog_bucket(js: JetStreamContext) -> KeyValue:
    """The bucket of model cards (key: `subjects.token(name)`), made unless it is there."""
    return await _bucket(js, subjects.CATALOG_BUCKET, None)


async def idempotency_bucket(js: JetStreamContext, ttl_s: float) -> KeyValue:
    """The bucket of Idempotency-Keys (by digest); entries go away after `ttl_s` seconds."""
    return await _bucket(js, subjects.IDEMPOTENCY_BUCKET, ttl_s)


async def keys_bucket(js: JetStreamContext) -> KeyValue:
    """The bucket of API keys (key: SHA-256 of the API key, in hex)."""
    return await _bucket(js, subjects.KEYS_BUCKET, None)


async def migrations_bucket(js: JetStreamContext) -> KeyValue:
    """The bucket of migrations (key: the migration's id); what has not changed for MIGRATION_KEPT_S goes away."""
    return await _bucket(js, subjects.MIGRATIONS_BUCKET, MIGRATION_KEPT_S)


async def _bucket(js: JetStreamContext, name: str, ttl_s: float | None) -> KeyValue:
    try:
        return await js.create_key_value(bucket=name, history=1, ttl=ttl_s, direct=True)
    except BadRequestError as e:
        if e.err_code != _NAME_IN_USE:
            raise
        return await js.key_value(name)
