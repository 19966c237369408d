"""Changes of API keys at the same time, on one gateway or on several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.key_writer import Actor, KeyWriter
from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.contracts.keys import ApiKey, ChangeKey, NewKey, RotateKey
from shared.errors import Conflict, NotFound, Unavailable
from shared.messaging.buckets import BucketWatcher
from shared.messaging.streams import keys_bucket
from shared.tasks import end
from tests.support.fake_engine import FakeNode

ACTOR = Actor("root")


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    """A gateway's copy of the keys, which no other gateway's changes reach."""
    return KeyStore(KeyMarker(tmp_path / "keys"))


@pytest.fixture
def writer(node: FakeNode, store: KeyStore) -> KeyWriter:
    return KeyWriter(node.mesh, store)


def new_key(key: str) -> NewKey:
    return NewKey(name="alice", sha256=hash_key(key))


async def stored(node: FakeNode, key: str) -> ApiKey:
    bucket = await node.mesh.nc.jetstream().key_value(subjects.KEYS_BUCKET)
    return ApiKey.model_validate_json((await bucket.get(hash_key(key))).value or b"")


async def test_two_changes_at_once_are_both_kept(writer: KeyWriter, node: FakeNode) -> None:
    await writer.add(new_key("a"), ACTOR)
    await asyncio.gather(
        writer.change("alice", ChangeKey(requests_per_minute=7), ACTOR),
        writer.change("alice", ChangeKey(tokens_per_minute=9), ACTOR),
    )
    found = await stored(node, "a")
    assert (found.requests_per_minute, found.tokens_per_minute) == (7, 9)


async def test_a_change_of_an_outdated_copy_is_a_conflict(writer: KeyWriter, store: KeyStore, node: FakeNode) -> None:
    """Another gateway has changed the key, and this one has not read it yet."""
    outdated = await writer.add(new_key("a"), ACTOR)
    await writer.change("alice", ChangeKey(requests_per_minute=7), ACTOR)
    store.put(hash_key("a"), outdated.model_dump_json().encode())
    with pytest.raises(Conflict, match="changed meanwhile"):
        await writer.change("alice", ChangeKey(tokens_per_minute=9), ACTOR)
    assert (await stored(node, "a")).requests_per_minute == 7


async def test_a_name_is_added_once(writer: KeyWriter, store: KeyStore) -> None:
    found = await asyncio.gather(*(writer.add(new_key(k), ACTOR) for k in ("a", "b")), return_exceptions=True)
    assert [type(f) for f in found] == [ApiKey, Conflict]
    assert list(store.find_named("alice")) == [hash_key("a")]


async def test_a_name_is_added_once_by_two_gateways(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.adapters.key_writer._TIMEOUT_S", 60.0)  # the second one begins again
    stores = [KeyStore(KeyMarker(tmp_path / name)) for name in ("first", "second")]
    watchers = [BucketWatcher(node.mesh, keys_bucket, store, store.own_writes) for store in stores]
    running = [asyncio.create_task(watcher.run()) for watcher in watchers]
    writers = [KeyWriter(node.mesh, s, partial(w.catch_up, 60.0)) for s, w in zip(stores, watchers, strict=True)]
    try:
        await until(lambda: all(store.complete and w._followed for store, w in zip(stores, watchers, strict=True)))
        for number in range(3):
            key = NewKey(name=f"bob-{number}", sha256=hash_key(f"a{number}"))
            other = key.model_copy(update={"sha256": hash_key(f"b{number}")})
            adding = (w.add(k, ACTOR) for w, k in zip(writers, (key, other), strict=True))
            found = await asyncio.gather(*adding, return_exceptions=True)
            assert sorted(type(f).__name__ for f in found) == ["ApiKey", "Conflict"]
            assert [await w.catch_up(60.0) for w in watchers] == [True, True]
            named = [store.find_named(key.name).keys() for store in stores]
            assert named[0] == named[1]
            assert len(named[0]) == 1
    finally:
        await end(*running)


async def test_a_key_is_added_under_one_name(writer: KeyWriter, store: KeyStore) -> None:
    await writer.add(new_key("a"), ACTOR)
    store.remove(hash_key("a"))  # as if another gateway had added it just now
    with pytest.raises(Conflict, match="under another name"):
        await writer.add(NewKey(name="bob", sha256=hash_key("a")), ACTOR)


async def test_a_key_is_not_added_while_the_copy_is_late(node: FakeNode, store: KeyStore) -> None:
    async def is_late() -> bool:
        return False

    with pytest.raises(Unavailable, match="Repeat"):
        await KeyWriter(node.mesh, store, is_late).add(new_key("a"), ACTOR)
    assert store.find_named("alice") == {}


async def test_a_key_is_rotated_once_at_a_time(writer: KeyWriter, store: KeyStore) -> None:
    await writer.add(new_key("a"), ACTOR)
    rotations = (writer.rotate("alice", RotateKey(sha256=hash_key(k)), ACTOR) for k in ("b", "c"))
    found = await asyncio.gather(*rotations, return_exceptions=True)
    assert [type(f) for f in found] == [ApiKey, Conflict]
    assert store.find_named("alice").keys() == {hash_key("a"), hash_key("b")}


@pytest.mark.parametrize("again", ["b", "c"])
async def test_a_rotation_that_the_loss_of_nats_interrupts_can_be_repeated(
    writer: KeyWriter, store: KeyStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    await writer.add(new_key("a"), ACTOR)

    async def fail(*_: Any) -> None:
        raise TimeoutError

    with monkeypatch.context() as lost:
        lost.setattr(KeyWriter, "_update", fail)
        with pytest.raises(Unavailable):
            await writer.rotate("alice", RotateKey(sha256=hash_key("b")), ACTOR)
    assert store.find_named("alice").keys() == {hash_key("a"), hash_key("b")}
    await writer.rotate("alice", RotateKey(sha256=hash_key(again), overlap_s=60), ACTOR)
    found = {key: await stored(node, key) for key in {"a", "b", again}}
    assert found.pop(again).expires is None
    assert all(key.expires is not None for key in found.values())
    with pytest.raises(Conflict, match="being rotated"):
        await writer.rotate("alice", RotateKey(sha256=hash_key("d")), ACTOR)


@pytest.mark.parametrize("overlap_s", [0, 60])
async def test_a_key_that_is_revoked_during_its_rotation_has_no_successor(
    writer: KeyWriter, store: KeyStore, monkeypatch: pytest.MonkeyPatch, overlap_s: int
) -> None:
    await writer.add(new_key("a"), ACTOR)
    create = KeyWriter._create

    async def create_and_revoke(self: KeyWriter, bucket: Any, digest: str, key: ApiKey) -> None:
        await create(self, bucket, digest, key)
        await bucket.delete(hash_key("a"))  # by another gateway

    monkeypatch.setattr(KeyWriter, "_create", create_and_revoke)
    with pytest.raises(NotFound, match="revoked meanwhile"):
        await writer.rotate("alice", RotateKey(sha256=hash_key("b"), overlap_s=overlap_s), ACTOR)
    assert store.find(hash_key("b")) is None


class LateWatcher(BucketWatcher):
    """Delivers changes only while `may_deliver` is set."""

    def __init__(self, node: FakeNode, store: KeyStore) -> None:
        super().__init__(node.mesh, keys_bucket, store, store.own_writes)
        self.may_deliver = asyncio.Event()
        self.updates: asyncio.Queue[Any] = asyncio.Queue()

    async def _apply_change(self, bucket: Any, watcher: Any) -> bool:
        self.updates = watcher._updates
        await self.may_deliver.wait()
        return await super()._apply_change(bucket, watcher)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 - nats-py's queue has no event to await
            await asyncio.sleep(0.01)


async def test_a_late_record_does_not_make_a_revoked_key_valid(
    writer: KeyWriter, store: KeyStore, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = LateWatcher(node, store)
    running = asyncio.create_task(watcher.run())
    try:
        await until(lambda: store.complete)
        await writer.add(new_key("a"), ACTOR)
        await until(lambda: watcher.updates.qsize() == 2)  # the marker that a key has existed, and the key
        await writer.revoke("alice", ACTOR)
        delivered: list[str] = []
        monkeypatch.setattr(store, "put", lambda key, _: delivered.append(key))
        watcher.may_deliver.set()
        await watcher.catch_up(10.0)
        assert delivered == ["existed.inference"]
        assert store.find(hash_key("a")) is None
    finally:
        await end(running)
