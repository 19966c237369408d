"""Watching a bucket of a real NATS server.

No entry is missed, no request is in vain, and no consumer is left behind.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from shared import tasks
from shared.messaging import Mesh, buckets
from shared.messaging.buckets import BucketWatcher
from shared.messaging.consumers import watching
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

NAME = "watched"
"""Name of the test's bucket."""
_numbers = itertools.count(1)
WATCHERS = 60
"""Enough to fail: one watcher in ten was wrong."""
ENTRIES = 40


class RecordedChanges:
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
        self._notification = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def begun(self) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: bool(self.snapshots))

    async def until(self, entries: dict[str, bytes]) -> None:
        await self.begun()
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.entries == entries)


@pytest.fixture(autouse=True)
def new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the test's bucket.

    NATS may give a bucket the entries of one of the same name that was deleted just before.
    """
    monkeypatch.setitem(globals(), "NAME", f"watched-{next(_numbers)}")


@pytest.fixture
async def mesh(nats_server: NatsServer) -> AsyncIterator[Mesh]:
    async with connected_mesh(nats_server) as mesh:
        yield mesh
        await mesh.nc.jetstream().delete_key_value(NAME)


@asynccontextmanager
async def watched(mesh: Mesh, *, again_s: float = 1.0) -> AsyncIterator[RecordedChanges]:
    async def bucket(js: JetStreamContext, replicas: int) -> KeyValue:
        return await js.key_value(NAME)

    changes = RecordedChanges()
    running = asyncio.create_task(BucketWatcher(mesh, bucket, changes).run())
    try:
        yield changes
    finally:
        await tasks.end(running, again_s=again_s)


async def consumers(mesh: Mesh) -> int:
    return int((await mesh.nc.jetstream().stream_info(f"KV_{NAME}")).state.consumer_count)


async def test_entry_written_during_the_snapshot_is_not_missed(mesh: Mesh) -> None:
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    for key in ("calm", "busy"):
        await bucket.put(key, b"0")

    async def write() -> None:
        while True:
            await bucket.put("busy", b"1")

    writing = asyncio.create_task(write())
    first = []
    for _ in range(WATCHERS):
        # Changes arrive all the time: most cancellations are swallowed.
        async with watched(mesh, again_s=0.01) as changes:
            await changes.begun()
        first.append(changes.snapshots[0].keys())
    writing.cancel()
    assert first == [{"calm", "busy"}] * WATCHERS


async def test_changes_arrive_in_order(mesh: Mesh) -> None:
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    await bucket.put("a", b"1")
    await bucket.put("gone", b"1")
    await bucket.delete("gone")
    async with watched(mesh) as changes:
        await changes.until({"a": b"1"})
        await bucket.put("b", b"2")
        await changes.until({"a": b"1", "b": b"2"})
        await bucket.delete("a")
        await changes.until({"b": b"2"})
    assert changes.snapshots == [{"a": b"1"}]


async def test_copy_that_is_behind_catches_up(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    may_apply, questions = asyncio.Event(), 0
    apply, find = BucketWatcher._apply_change, buckets._find_newest_revision

    async def apply_later(self: BucketWatcher, bucket: KeyValue, watcher: Any) -> bool:
        await may_apply.wait()
        return await apply(self, bucket, watcher)

    async def count(bucket: KeyValue) -> int:
        nonlocal questions
        questions += 1
        return await find(bucket)

    monkeypatch.setattr(BucketWatcher, "_apply_change", apply_later)
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    changes = RecordedChanges()
    watcher = BucketWatcher(mesh, lambda js, _: js.key_value(NAME), changes)
    await watcher.catch_up(60)  # it has not begun
    running = asyncio.create_task(watcher.run())
    try:
        await changes.begun()
        await bucket.put("a", b"1")
        await watcher.catch_up(0.05)
        assert changes.entries == {}, "the wait is bounded"
        monkeypatch.setattr(buckets, "_find_newest_revision", count)
        waiting = [asyncio.create_task(watcher.catch_up(60)) for _ in range(20)]
        may_apply.set()
        await asyncio.gather(*waiting)
        assert changes.entries == {"a": b"1"}
        assert questions <= 2, "callers share them"
        await bucket.delete("a")
        await watcher.catch_up(60)
        assert changes.entries == {}
    finally:
        await tasks.end(running)


async def test_watcher_queries_expired_entries_only_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
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

    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1, ttl=1.0)
    await bucket.put("a", b"1")
    async with asyncio.timeout(60):
        while (await status(bucket)).values:  # noqa: ASYNC110 - the condition is in the NATS server
            await asyncio.sleep(0.02)
    monkeypatch.setattr(KeyValue, "status", counted)
    async with watched(mesh) as changes:
        async with asyncio.timeout(60):
            while asked < 5:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
        await bucket.put("b", b"2")
        await changes.until({"b": b"2"})
    assert changes.snapshots == [{}]


async def test_entries_that_are_on_their_way_precede_the_end(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's answer about the consumer overtakes what it has sent."""
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    for key in "abc":
        await bucket.put(key, b"1")
    held: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    process = mesh.nc._process_msg

    async def hold(sid: int, subject: bytes, *rest: Any) -> None:
        if subject.startswith(b"$KV."):
            held.put_nowait((sid, subject, *rest))
        else:
            await process(sid, subject, *rest)

    monkeypatch.setattr(mesh.nc, "_process_msg", hold)
    async with asyncio.timeout(60), watching(bucket) as watcher:
        for _ in "abc":
            await process(*await held.get())
        found = [(await watcher.updates(timeout=60)).key for _ in "abc"]
        assert found == ["a", "b", "c"]
        assert await watcher.updates(timeout=60) is None


async def test_an_empty_bucket_ends_at_once(mesh: Mesh) -> None:
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    async with watching(bucket) as watcher:
        assert await watcher.updates(timeout=60) is None
        await bucket.put("a", b"1")
        assert (await watcher.updates(timeout=60)).key == "a"


async def test_no_consumer_stays_behind(mesh: Mesh) -> None:
    """The watcher leaves no consumer behind.

    A stream has room for a thousand, and the server would keep each for minutes.
    """
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    await bucket.put("a", b"1")
    async with watching(bucket) as one, watching(bucket, "a") as other:
        assert (await one.updates(timeout=60)).value == (await other.updates(timeout=60)).value == b"1"
        assert await consumers(mesh) == 2
    async with watched(mesh) as changes:
        await changes.until({"a": b"1"})
    assert await consumers(mesh) == 0


async def test_ordered_consumer_has_no_polling_task(mesh: Mesh) -> None:
    """nats-py's task wakes four times a second, and has nothing to do for a watcher."""
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    async with watching(bucket) as watcher:
        await watcher.updates(timeout=60)
        async with asyncio.timeout(60):
            await asyncio.wait([watcher._sub._sub._jsi._fctask])


async def test_flow_control_is_answered(mesh: Mesh) -> None:
    """Without replies to flow control the server stops before the end of so many bytes."""
    bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
    value = b"x" * 500_000
    for key in range(ENTRIES):
        await bucket.put(str(key), value)
    async with watching(bucket) as watcher, asyncio.timeout(60):
        found = 0
        while (await watcher.updates(timeout=60)) is not None:
            found += 1
            await asyncio.sleep(0.01)  # so that messages wait in the client when the server asks
    assert found == ENTRIES


async def test_change_after_a_nats_restart_is_received_immediately(own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted server has lost the consumer. The check of the revision must not be needed."""
    monkeypatch.setattr(buckets, "_CHECK_S", 60.0)
    async with connected_mesh(own_nats) as mesh, connected_mesh(own_nats) as other:
        bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
        await bucket.put("a", b"1")
        async with watched(mesh) as mirror:
            await mirror.until({"a": b"1"})
            own_nats.restart()
            async with asyncio.timeout(60):
                while not (mesh.reconnections and other.nc.is_connected):  # noqa: ASYNC110 - the condition is in NATS's client
                    await asyncio.sleep(0.02)
            await (await other.nc.jetstream().key_value(NAME)).put("b", b"2")
            await mirror.until({"a": b"1", "b": b"2"})


async def test_watch_that_ended_while_disconnected_is_not_restored(own_nats: NatsServer) -> None:
    async with connected_mesh(own_nats) as mesh:
        bucket = await mesh.nc.jetstream().create_key_value(bucket=NAME, history=1)
        async with watching(bucket) as watcher:
            await watcher.updates(timeout=60)
            subscription = watcher._sub
            assert subscription._id in mesh.nc._subs
            own_nats.kill()
            async with asyncio.timeout(60):
                while mesh.nc.is_connected:  # noqa: ASYNC110 - the condition is in NATS's client
                    await asyncio.sleep(0.02)
        own_nats.restart()
        async with asyncio.timeout(60):
            while not mesh.reconnections:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
        assert subscription._id not in mesh.nc._subs
