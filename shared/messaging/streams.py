"""JetStream streams and buckets: each made where it is first needed, the same everywhere."""

from __future__ import annotations

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import BadRequestError
from nats.js.kv import KeyValue

from shared.contracts import subjects
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT

_NAME_IN_USE = 10058
IDEMPOTENCY_BUCKET = "thaw_idempotency"


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
    """The bucket of answers to requests with an Idempotency-Key; entries go away after `ttl_s` seconds."""
    return await _bucket(js, IDEMPOTENCY_BUCKET, ttl_s)


async def _bucket(js: JetStreamContext, name: str, ttl_s: float | None) -> KeyValue:
    try:
        return await js.create_key_value(bucket=name, history=1, ttl=ttl_s, direct=True)
    except BadRequestError as e:
        if e.err_code != _NAME_IN_USE:
            raise
        return await js.key_value(name)
