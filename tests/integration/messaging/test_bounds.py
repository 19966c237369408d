"""Streams and buckets at their bounds.

Every bound holds, those of earlier versions are updated, and a full store reports that.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from services.gateway.adapters.idempotency_store import Claim, Entry, IdempotencyStore
from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.key_writer import Actor, KeyWriter
from services.scheduler.adapters.catalog import Catalog
from shared.contracts import stream_limits, subjects
from shared.contracts.keys import NewKey
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import StoreFull
from shared.messaging import Mesh, full_stores, streams
from shared.messaging.streams import StreamRefused
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer
from thaw.launcher.home import Home
from thaw.launcher.plan import Credentials, MeshPlan
from thaw.launcher.servers import write_nats_config

SMALL = 16 * 1024
ROOT = Path(__file__).parents[3]


@pytest.fixture
async def mesh(own_nats: NatsServer) -> AsyncIterator[Mesh]:
    async with connected_mesh(own_nats) as mesh:
        yield mesh


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in stream_limits.MAX_BYTES:
        monkeypatch.setitem(stream_limits.MAX_BYTES, name, SMALL)


async def used(mesh: Mesh, stream: str) -> int:
    return int((await mesh.nc.jetstream().stream_info(stream)).state.bytes)


def a_key(number: int) -> NewKey:
    return NewKey(name=f"key-{number}", sha256=f"{number:064x}")


def a_card(number: int) -> ModelCard:
    info = ModelInfo(
        source=f"/models/{number}", revision="r", architecture="A", model_type="a", task="generate", weights_bytes=1, parameters=1,
        dtype="float32", context_length=1, kv_bytes_per_token=1,
    )  # fmt: skip
    return ModelCard(spec=ModelSpec(name=f"model-{number}", source=info.source), info=info, created=number)


async def filled(write: Callable[[int], Awaitable[None]]) -> tuple[int, StoreFull]:
    """Write until the store is full; return the number of writes, and the error."""
    for number in range(1000):
        try:
            await write(number)
        except StoreFull as e:
            return number, e
    raise AssertionError("a thousand entries have room")


async def test_every_stream_is_created_with_its_bound(mesh: Mesh) -> None:
    js = mesh.nc.jetstream()
    await streams.ensure_trace_stream(js)
    await streams.ensure_keyed_stream(js, 60, stream_limits.KEYED_REPLIES_BYTES)
    await streams.ensure_audit_stream(js)
    await streams.idempotency_bucket(js, 60)
    await streams.responses_bucket(js, 60)
    await streams.files_bucket(js, 60)
    buckets = (
        streams.catalog_bucket,
        streams.keys_bucket,
        streams.console_bucket,
        streams.migrations_bucket,
        streams.batches_bucket,
    )
    for opened in buckets:
        await opened(js)
    there = {i.config.name.removeprefix("KV_"): i.config.max_bytes for i in await js.streams_info() if i.config.name}
    assert there == stream_limits.MAX_BYTES


async def test_buckets_of_earlier_versions_receive_their_bound(mesh: Mesh) -> None:
    js = mesh.nc.jetstream()
    for name in (subjects.KEYS_BUCKET, subjects.MIGRATIONS_BUCKET):
        await (await js.create_key_value(bucket=name, history=1, direct=True)).put("k", b"kept")
    # A process without permission to change the store reads it as it is.
    await streams.migrations_bucket(js)
    assert (await js.stream_info(f"KV_{subjects.MIGRATIONS_BUCKET}")).config.max_bytes == -1
    for bucket in (await streams.keys_bucket(js), await streams.migrations_bucket(js, owner=True)):
        status = await bucket.status()
        assert status.stream_info.config.max_bytes == stream_limits.MAX_BYTES[status.bucket]
        assert (await bucket.get("k")).value == b"kept"


async def test_traces_beyond_the_bound_push_out_the_oldest(mesh: Mesh, small: None) -> None:
    js = mesh.nc.jetstream()
    await streams.ensure_trace_stream(js)
    for number in range(100):
        await js.publish(subjects.request_trace(str(number)), b"x" * 1024)
    assert SMALL / 2 < await used(mesh, subjects.TRACE_STREAM) <= SMALL
    assert (await js.get_last_msg(subjects.TRACE_STREAM, subjects.request_trace("99"))).data == b"x" * 1024


async def test_keyed_replies_beyond_the_bound_push_out_the_oldest(mesh: Mesh) -> None:
    js = mesh.nc.jetstream()
    await streams.ensure_keyed_stream(js, 60, SMALL)
    for number in range(100):
        await js.publish(subjects.keyed_reply("g", str(number)), b"x" * 1024)
    assert SMALL / 2 < await used(mesh, subjects.KEYED_STREAM) <= SMALL


async def test_migrations_beyond_the_bound_push_out_the_oldest(mesh: Mesh, small: None) -> None:
    bucket = await streams.migrations_bucket(mesh.nc.jetstream())
    running = await bucket.create("running", b"1")
    for number in range(100):
        await bucket.create(str(number), b"x" * 1024)
        running = await bucket.update("running", b"1", last=running)
    assert SMALL / 2 < await used(mesh, f"KV_{subjects.MIGRATIONS_BUCKET}") <= SMALL
    assert {"running", "99"} < set(await bucket.keys())


async def test_full_api_key_store_refuses_additions_and_accepts_revocations(mesh: Mesh, small: None, tmp_path: Path) -> None:
    store = KeyStore(KeyMarker(tmp_path))
    writer, actor = KeyWriter(mesh, store), Actor("test")

    async def add(number: int) -> None:
        await writer.add(a_key(number), actor)

    made, full = await filled(add)
    assert "thaw keys revoke" in full.message
    assert (full.status, full.should_retry) == (503, False)
    assert SMALL / 2 < await used(mesh, f"KV_{subjects.KEYS_BUCKET}") <= SMALL
    assert len(store.list_keys()) == made > 10
    for number in range(made):
        await writer.revoke(f"key-{number}", actor)
    assert store.list_keys() == []
    await writer.add(a_key(made), actor)


async def test_full_idempotency_store_refuses_new_keys_and_completes_existing_ones(mesh: Mesh, small: None) -> None:
    store = IdempotencyStore(mesh, "g", 60, SMALL)
    claims: list[Claim] = []

    async def claim(number: int) -> None:
        found = await store.claim_or_get(str(number), Entry(request="r", answer_id="a", created=1))
        assert isinstance(found, Claim)
        claims.append(found)

    _, full = await filled(claim)
    assert "THAW_IDEMPOTENCY_TTL" in full.message
    assert SMALL / 2 < await used(mesh, f"KV_{subjects.IDEMPOTENCY_BUCKET}") <= SMALL
    await claims[0].delete()
    await claims[1].complete(3, None)
    again = await store.claim_or_get("1", Entry(request="r", answer_id="a", created=1))
    assert not isinstance(again, Claim)
    assert again.entry.state == "done"


async def test_a_full_catalogue_refuses_a_model_until_another_is_removed(mesh: Mesh, small: None) -> None:
    catalog = Catalog(mesh.nc.jetstream())
    made, full = await filled(lambda number: catalog.put(a_card(number)))
    assert f"model-{made} is registered" in full.message
    assert SMALL / 2 < await used(mesh, f"KV_{subjects.CATALOG_BUCKET}") <= SMALL
    assert f"model-{made}" not in {c.name for c in (await catalog.read()).values()}
    for gone in range(3):
        await catalog.delete(f"model-{gone}")
    assert {c.name for c in (await catalog.read()).values()} == {f"model-{n}" for n in range(3, made + 1)}
    # A leader that starts with more models than fit stores those that fit.
    await catalog.reconcile([a_card(n) for n in range(made + 50)])
    assert made - 3 < len(await catalog.read()) < made + 50


async def test_too_few_servers_for_the_replicas_is_reported(mesh: Mesh) -> None:
    with pytest.raises(StreamRefused, match="THAW_NATS_REPLICAS"):
        await streams.keys_bucket(mesh.nc.jetstream(), 3)
    bucket = await streams.keys_bucket(mesh.nc.jetstream())
    await bucket.put("k", b"1")
    assert (await (await streams.keys_bucket(mesh.nc.jetstream(), 3)).get("k")).value == b"1"


async def test_concurrent_bucket_creation_creates_one(mesh: Mesh) -> None:
    buckets = await asyncio.gather(*(streams.catalog_bucket(mesh.nc.jetstream()) for _ in range(8)))
    assert len({b._name for b in buckets}) == 1
    made = await asyncio.gather(*(_created(b) for b in buckets))
    assert sorted(made) == [False] * 7 + [True]


async def _created(bucket: KeyValue) -> bool:
    try:
        await bucket.create("k", b"1")
    except KeyWrongLastSequenceError:
        return False
    return True


async def test_the_sum_of_the_bounds_fits_the_servers_limit(tmp_path: Path) -> None:
    """The sum of all bounds fits the server's limit.

    nats-server reserves them itself when it creates the streams.
    """
    server = NatsServer(
        jetstream=f"max_file_store: {stream_limits.max_file_store()}, max_memory_store: {stream_limits.MAX_MEMORY_STORE_BYTES}"
    )
    with contextlib.closing(server):
        async with connected_mesh(server) as mesh:
            js = mesh.nc.jetstream()
            await streams.ensure_keyed_stream(js, 60, stream_limits.KEYED_REPLIES_BYTES)
            for name, size in stream_limits.MAX_BYTES.items():
                if name != subjects.KEYED_STREAM:
                    await js.add_stream(StreamConfig(name=f"S_{name}", subjects=[f"s.{name}"], max_bytes=size))
            more = StreamConfig(name="MORE", subjects=["more"], max_bytes=sum(stream_limits.MAX_BYTES.values()))
            with pytest.raises(APIError) as refused:
                await js.add_stream(more)
            assert refused.value.err_code in full_stores.NO_STORAGE
            with pytest.raises(StreamRefused, match="max_file_store"):
                await streams._create(js, more)


def test_launcher_and_compose_configure_the_same_store_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    home.run.mkdir(parents=True)
    plan = MeshPlan(
        port=1, nats_port=2, postgres_port=3, credentials=Credentials(nats_password="n", database_password="d", admin_key="a")
    )
    assert f"max_file_store: {stream_limits.max_file_store()}," in write_nats_config(home, plan).read_text()
    monkeypatch.setenv("THAW_IDEMPOTENCY_BYTES", str(2**40))
    (stated,) = re.findall(r"max_file_store: (\d+),", write_nats_config(home, plan).read_text())
    assert int(stated) > 2**40
    (megabytes,) = re.findall(r"max_file_store: (\d+)MB", (ROOT / "compose" / "nats.conf").read_text())
    assert int(megabytes) * stream_limits.MIB > sum(stream_limits.MAX_BYTES.values())
