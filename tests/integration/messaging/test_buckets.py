"""Watching a bucket of a real NATS server.

No entry is missed, no request is in vain, and no consumer is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from pydantic import SecretStr

from shared.messaging import Mesh, buckets
from shared.messaging.buckets import BucketWatcher
from shared.messaging.consumers import watching
from shared.settings import CommonSettings
from tests.support.servers import NatsServer

NAME = "watched"
WATCHERS = 60
"""Enough to fail: one watcher in ten was wrong."""


class Told:
    """A watcher's reports, in their order."""

    def __init__(self) -> None:
        self.snapshots: list[dict[str, bytes]] = []
        self.entries: dict[str, bytes] = {}
        self.changed = asyncio.Condition()

    def replace(self, entries: dict[str, bytes]) -> None:
        self.snapshots.append(entries)
        self._now(dict(entries))

    def put(self, key: str, value: bytes) -> None:
        self._now({**self.entries, key: value})

    def remove(self, key: str) -> None:
        self._now({k: v for k, v in self.entries.items() if k != key})

    def _now(self, entries: dict[str, bytes]) -> None:
        self.entries = entries
        self._tell = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def begun(self) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: bool(self.snapshots))

    async def until(self, entries: dict[str, bytes]) -> None:
        await self.begun()
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: self.entries == entries)


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    yield mesh
    await mesh.nc.jetstream().delete_key_value(NAME)
    await mesh.stop()


@asynccontextmanager
async def watched(mesh: Mesh) -> AsyncIterator[Told]:
    async def bucket(js: JetStreamContext, replicas: int) -> KeyValue:
        return await js.key_value(NAME)

    told = Told()
    running = asyncio.create_task(BucketWatcher(mesh, bucket, told).run())
    try:
        yield told
    finally:
        # Python 3.11 swallows a cancellation that arrives together with an entry.
        while not running.done():
            running.cancel()
            await asyncio.wait([running], timeout=0.01)


async def consumers(mesh: Mesh) -> int:
    return int((await mesh.nc.jetstream().stream_info(f"KV_{NAME}")).state.consumer_count)


async def test_an_entry_that_is_written_just_then_is_not_missed(mesh: Mesh) -> None:
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    for key in ("calm", "busy"):
        await bucket.put(key, b"0")

    async def write() -> None:
        while True:
            await bucket.put("busy", b"1")

    writing = asyncio.create_task(write())
    first = []
    for _ in range(WATCHERS):
        async with watched(mesh) as told:
            await told.begun()
        first.append(told.snapshots[0].keys())
    writing.cancel()
    assert first == [{"calm", "busy"}] * WATCHERS


async def test_changes_come_in_their_order(mesh: Mesh) -> None:
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    await bucket.put("a", b"1")
    await bucket.put("gone", b"1")
    await bucket.delete("gone")
    async with watched(mesh) as told:
        await told.until({"a": b"1"})
        await bucket.put("b", b"2")
        await told.until({"a": b"1", "b": b"2"})
        await bucket.delete("a")
        await told.until({"b": b"2"})
    assert told.snapshots == [{"a": b"1"}]


async def test_of_entries_that_have_expired_it_does_not_ask_again(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher asks only once about expired entries.

    Their last number remains that of the stream.
    """
    monkeypatch.setattr(buckets, "_CHECK_S", 0.02)
    asked = 0
    status = KeyValue.status

    async def counted(self: KeyValue) -> KeyValue.BucketStatus:
        nonlocal asked
        asked += 1
        return await status(self)

    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1, ttl=0.2)
    await bucket.put("a", b"1")
    async with asyncio.timeout(10):
        while (await status(bucket)).values:  # noqa: ASYNC110 - the condition is in the NATS server
            await asyncio.sleep(0.02)
    monkeypatch.setattr(KeyValue, "status", counted)
    async with watched(mesh) as told:
        async with asyncio.timeout(10):
            while asked < 5:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
        await bucket.put("b", b"2")
        await told.until({"b": b"2"})
    assert told.snapshots == [{}]


async def test_no_consumer_stays_behind(mesh: Mesh) -> None:
    """The watcher leaves no consumer behind.

    A stream has room for a thousand, and the server would keep each for minutes.
    """
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    await bucket.put("a", b"1")
    async with watching(bucket) as one, watching(bucket, "a") as other:
        assert (await one.updates(timeout=5)).value == (await other.updates(timeout=5)).value == b"1"
        assert await consumers(mesh) == 2
    async with watched(mesh) as told:
        await told.until({"a": b"1"})
    assert await consumers(mesh) == 0
