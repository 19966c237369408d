"""Create JetStream streams and buckets, on first use and with the same settings."""

from __future__ import annotations

import logging

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StoreCompression, StreamConfig
from nats.js.client import KV_PRE_TEMPLATE, KV_STREAM_TEMPLATE
from nats.js.errors import APIError, NotFoundError
from nats.js.kv import KeyValue

from shared.contracts import subjects
from shared.contracts.migration import MIGRATION_KEPT_S
from shared.contracts.stream_limits import MAX_BYTES
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT
from shared.messaging.full_stores import NO_STORAGE

log = logging.getLogger(__name__)
_NAME_IN_USE = 10058
_NO_PEERS = (10005, 10074)
_DUPLICATE_WINDOW_S = 120.0


class StreamRefused(NatsError):
    """NATS refused to create a stream: too few servers, or too little storage."""


async def ensure_trace_stream(js: JetStreamContext, replicas: int = 1) -> None:
    """Create the stream of traces if it is missing.

    Beyond its limits the oldest traces are removed first. Several processes may call this at once.
    """
    config = StreamConfig(
        name=subjects.TRACE_STREAM,
        subjects=[subjects.TRACE_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=TRACE_MAX_AGE_S,
        max_msgs=TRACE_MAX_COUNT,
        max_bytes=MAX_BYTES[subjects.TRACE_STREAM],
        num_replicas=replicas,
        # Every request writes one: it does not wait for the disk, and a power cut may take the last
        # of them.
        persist_mode=PersistMode.ASYNC if replicas == 1 else None,
        allow_direct=True,
    )
    await _ensure(js, config, ("max_age", "max_msgs", "max_bytes"))


async def ensure_keyed_stream(js: JetStreamContext, max_age_s: float, max_bytes: int, replicas: int = 1) -> None:
    """Create the stream of engine responses to requests with an Idempotency-Key.

    Beyond `max_bytes` the oldest messages are removed first.
    """
    config = StreamConfig(
        name=subjects.KEYED_STREAM,
        subjects=[subjects.KEYED_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        compression=StoreCompression.S2,
        discard=DiscardPolicy.OLD,
        max_age=max_age_s,
        max_bytes=max_bytes,
        num_replicas=replicas,
        allow_direct=True,
    )
    await _ensure(js, config, ("max_age", "max_bytes"))


async def ensure_audit_stream(js: JetStreamContext, replicas: int = 1) -> None:
    """Create the audit log of API keys if it is missing.

    Beyond its limit the oldest entries are removed first.
    """
    config = StreamConfig(
        name=subjects.AUDIT_STREAM,
        subjects=[subjects.AUDIT_SUBJECTS],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_bytes=MAX_BYTES[subjects.AUDIT_STREAM],
        num_replicas=replicas,
        deny_delete=True,
        allow_direct=True,
    )
    await _ensure(js, config, ())


async def catalog_bucket(js: JetStreamContext, replicas: int = 1, *, owner: bool = False) -> KeyValue:
    """Open the bucket of model cards, created if missing.

    The key of a card is `subjects.token(name)`. A full bucket refuses further cards.

    Args:
        owner: True for the scheduler, which may change the bucket's configuration.
    """
    return await _bucket(js, subjects.CATALOG_BUCKET, replicas, owner=owner)


async def idempotency_bucket(js: JetStreamContext, ttl_s: float, replicas: int = 1) -> KeyValue:
    """Open the bucket of Idempotency-Keys, created if missing.

    Its keys are digests. Entries expire after `ttl_s` seconds. A full bucket refuses further keys.
    """
    return await _bucket(js, subjects.IDEMPOTENCY_BUCKET, replicas, ttl_s)


async def keys_bucket(js: JetStreamContext, replicas: int = 1) -> KeyValue:
    """The bucket of API keys (key: SHA-256 of the API key, in hex).

    Full, it refuses further keys, but not revocations.
    """
    return await _bucket(js, subjects.KEYS_BUCKET, replicas)


async def console_bucket(js: JetStreamContext, replicas: int = 1) -> KeyValue:
    """Open the bucket of the console's sessions, created if missing.

    It has the secret that signs them, and those that a logout has ended, until they expire.
    """
    return await _bucket(js, subjects.CONSOLE_BUCKET, replicas, owner=False)


async def responses_bucket(js: JetStreamContext, ttl_s: float, replicas: int = 1) -> KeyValue:
    """Open the bucket of stored responses, created if missing.

    Entries expire after `ttl_s` seconds. A full bucket drops the oldest. Reads ask the leader, so
    that they find what has just been written.
    """
    return await _bucket(js, subjects.RESPONSES_BUCKET, replicas, ttl_s, DiscardPolicy.OLD, reads_leader=True)


async def batches_bucket(js: JetStreamContext, replicas: int = 1) -> KeyValue:
    """Open the bucket of files' and batches' records, created if missing.

    It has an entry for each API key. A full bucket refuses changes.
    """
    return await _bucket(js, subjects.BATCHES_BUCKET, replicas, reads_leader=True)


async def files_bucket(js: JetStreamContext, ttl_s: float, replicas: int = 1) -> KeyValue:
    """Open the bucket of files' contents, created if missing.

    A full bucket refuses further content, which expires after `ttl_s` seconds.
    """
    return await _bucket(js, subjects.FILES_BUCKET, replicas, ttl_s, reads_leader=True)


async def migrations_bucket(js: JetStreamContext, replicas: int = 1, *, owner: bool = False) -> KeyValue:
    """Open the bucket of migrations, created if missing.

    The key is the migration's id. Records unchanged for MIGRATION_KEPT_S seconds expire. A full
    bucket drops the record that changed longest ago: owners of running migrations renew theirs
    every second.

    Args:
        owner: True for the scheduler, which may change the bucket's configuration.
    """
    return await _bucket(js, subjects.MIGRATIONS_BUCKET, replicas, MIGRATION_KEPT_S, DiscardPolicy.OLD, owner=owner)


async def _bucket(
    js: JetStreamContext,
    name: str,
    replicas: int,
    ttl_s: float | None = None,
    discard: DiscardPolicy = DiscardPolicy.NEW,
    *,
    owner: bool = True,
    reads_leader: bool = False,
) -> KeyValue:
    """Open a bucket, created as by nats-py's `create_key_value`.

    That function cannot choose whether a full bucket drops or refuses entries.
    """
    config = StreamConfig(
        name=KV_STREAM_TEMPLATE.format(bucket=name),
        subjects=[f"$KV.{name}.>"],
        max_msgs_per_subject=1,
        max_age=ttl_s,
        max_bytes=MAX_BYTES[name],
        num_replicas=replicas,
        discard=discard,
        duplicate_window=min(ttl_s or _DUPLICATE_WINDOW_S, _DUPLICATE_WINDOW_S),
        allow_direct=True,
        allow_rollup_hdrs=True,
        allow_msg_ttl=True,
        deny_delete=True,
        storage=StorageType.FILE,
    )
    found = await _ensure(js, config, ("max_bytes", "discard") if owner else ())
    is_direct = bool(found.allow_direct) and not reads_leader
    return KeyValue(name=name, stream=str(config.name), pre=KV_PRE_TEMPLATE.format(bucket=name), js=js, direct=is_direct)


async def _ensure(js: JetStreamContext, config: StreamConfig, kept: tuple[str, ...]) -> StreamConfig:
    """Create a stream, or update an existing stream's fields `kept` from `config`.

    Replicas are only added: a process configured for fewer removes none. An existing stream is
    looked up and not proposed again, so that opening it does not depend on the leader of the
    cluster.

    Returns:
        The stream's configuration.
    """
    try:
        found = (await js.stream_info(str(config.name))).config
    except NotFoundError:
        found = await _create(js, config)
    if not kept:
        return found
    replicas = max(found.num_replicas or 1, config.num_replicas or 1)
    wanted = found.evolve(num_replicas=replicas, **{name: getattr(config, name) for name in kept})
    if wanted == found:
        return found
    try:
        return (await js.update_stream(wanted)).config
    except APIError as e:
        log.warning("a stream keeps its configuration", extra={"stream": config.name, "error": _explain_error(e, config)})
        return found


async def _create(js: JetStreamContext, config: StreamConfig) -> StreamConfig:
    try:
        return (await js.add_stream(config)).config
    except APIError as e:
        if e.err_code == _NAME_IN_USE:  # another process has just made it, with settings of its own
            return (await js.stream_info(str(config.name))).config
        if e.err_code in (*_NO_PEERS, *NO_STORAGE):
            raise StreamRefused(_explain_error(e, config)) from e
        raise


def _explain_error(error: APIError, config: StreamConfig) -> str:
    if error.err_code in _NO_PEERS:
        return (
            f"NATS has no {config.num_replicas} servers for {config.name}: {error.description}. "
            f"Start the missing servers of the cluster, or lower THAW_NATS_REPLICAS."
        )
    if error.err_code in NO_STORAGE:
        return f"NATS has no {config.max_bytes} bytes left for {config.name}: {error.description}. Raise its max_file_store."
    return str(error)
