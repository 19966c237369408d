"""Whichever process creates streams and buckets first, their bounds are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from shared.contracts import subjects
from shared.contracts.traces import TRACE_MAX_AGE_S, TRACE_MAX_COUNT
from shared.messaging.streams import catalog_bucket, ensure_trace_stream, idempotency_bucket
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer


@pytest.fixture
async def js(own_nats: NatsServer) -> AsyncIterator[JetStreamContext]:
    async with connected_mesh(own_nats) as mesh:
        yield mesh.nc.jetstream()


@pytest.mark.parametrize("before", [False, True])
async def test_the_trace_stream_is_bounded(js: JetStreamContext, before: bool) -> None:
    if before:
        await js.add_stream(StreamConfig(name=subjects.TRACE_STREAM, subjects=[subjects.TRACE_SUBJECTS]))
    await asyncio.gather(*(ensure_trace_stream(js) for _ in range(3)))
    config = (await js.stream_info(subjects.TRACE_STREAM)).config
    assert (config.max_age, config.max_msgs) == (TRACE_MAX_AGE_S, TRACE_MAX_COUNT)


@pytest.mark.parametrize("before", [False, True])
async def test_concurrently_created_buckets_are_shared(js: JetStreamContext, before: bool) -> None:
    if before:
        await js.create_key_value(bucket=subjects.CATALOG_BUCKET, history=3)
    first, second = await asyncio.gather(catalog_bucket(js), catalog_bucket(js))
    await first.put("a", b"1")
    assert (await second.get("a")).value == b"1"
    ttl = (await (await idempotency_bucket(js, 60.0)).status()).ttl
    assert ttl == 60.0
