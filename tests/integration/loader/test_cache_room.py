"""The SSD cache's budget, evictions, and memory on the way to its disk."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.stages import LayerRange, part_id
from tests.integration.loader.cached_loads import SHARD, load, settle
from tests.integration.loader.checksums import write_sums
from tests.integration.loader.leftovers import without_leftovers
from tests.integration.loader.tiers_server import TierServer
from tests.support.descriptors import open_files
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.cache import caching, store
from weights.cache.caching import CachingTier
from weights.cache.locks import FileLock
from weights.cache.partial import PartialModel
from weights.cache.store import EntryHandle, SsdCache
from weights.cache.write_behind import WriteBehind
from weights.sources.sources import Sources
from weights.tiers.http import HttpTier
from weights.tiers.port import Cancelled
from weights.tiers.retry import Backoff

QUICK = Backoff(attempts=3, first_s=0.001, most_s=0.01)
GIB = 1024**3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    directory = tmp_path / "www" / "m"
    write_checkpoint(directory, tensors(megabytes=4), shards=2)
    write_sums(directory)
    with without_leftovers("probe", "cache", "verify"):
        server = TierServer(tmp_path / "www")
        yield server
        server.close()


@pytest.fixture
def cache(tmp_path: Path) -> SsdCache:
    return SsdCache(tmp_path / "cache", GIB)


def opened(server: TierServer, cache: SsdCache) -> CachingTier:
    return CachingTier(HttpTier(f"{server.url}/m", QUICK), cache)


def test_load_that_takes_over_from_another_process_keeps_to_the_budget(server: TierServer, tmp_path: Path) -> None:
    """The other process may have found no room, too."""
    cache = SsdCache(tmp_path / "small", 1000)
    first = HttpTier(f"{server.url}/m", QUICK)
    other = cache.try_fill_lock(first.revision)
    first.close()
    assert other is not None
    tier = opened(server, cache)
    assert tier.is_following
    other.release()
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    assert not tier.caches
    settle(tier)
    assert cache.status().nbytes == 0


def test_close_does_not_wait_while_a_load_that_takes_over_makes_room(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(server, cache), opened(server, cache)
    room = FileLock.take(cache.root / "locks" / "room")
    assert room is not None
    make_room, making_room, cancelled = cache.make_room, threading.Event(), threading.Event()

    def make_room_later(revision: str, nbytes: int) -> bool:
        making_room.set()
        return make_room(revision, nbytes)

    def read() -> None:
        with pytest.raises(Cancelled):
            load(second)
        cancelled.set()

    monkeypatch.setattr(cache, "make_room", make_room_later)
    threads = [threading.Thread(target=read, daemon=True), threading.Thread(target=second.close, daemon=True)]
    with room:
        threads[0].start()
        first.close()
        assert making_room.wait(30)
        threads[1].start()
        threads[1].join(10)
        assert not threads[1].is_alive()
        assert not cancelled.is_set(), "another loader still makes room"
    assert cancelled.wait(30)
    fill = cache.try_fill_lock(second.revision)
    assert fill is not None, "a closed load keeps no lock"
    fill.release()


def test_failed_eviction_does_not_hide_the_model_from_a_load_that_begins(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    found: list[EntryHandle | None] = []

    class Watched(FileLock):
        """The load looks for the model at the moment at which the eviction fails."""

        @classmethod
        def take(cls, path: Path, **options: Any) -> FileLock | None:
            lock = FileLock.take(path, **options)
            if lock is None and not options.get("shared"):
                found.append(cache.acquire(tier.revision))
            return lock

    loading = cache.try_fill_lock(tier.revision)
    assert loading is not None
    monkeypatch.setattr(store, "FileLock", Watched)
    assert not cache.remove(tier.revision)
    [entry] = found
    assert entry is not None
    entry.release()
    loading.release()


def test_model_whose_files_cannot_be_removed_is_evicted_once(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as files that a host of the same network file system has open."""
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    size, tries = cache.status().nbytes, list[Path]()

    def leave(directory: Path, **_: object) -> None:
        tries.append(directory)
        assert len(tries) < 10, "it is evicted for ever"

    monkeypatch.setattr(shutil, "rmtree", leave)
    cache.budget = int(1.5 * size)
    assert not cache.make_room("0" * 32, size)
    assert not cache.remove(tier.revision)
    assert cache.acquire(tier.revision) is None, "it is no entry any more"


class LateWrites(WriteBehind):
    """A disk that writes only while a download waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[Callable[[], None]] = []
        self.most = 0

    def submit(self, write: Callable[[], None]) -> None:
        self.queued.append(write)
        self.most = max(self.most, len(self.queued))

    def wait_until_at_most(self, tasks: int, stop: threading.Event | None = None) -> None:
        while len(self.queued) > tasks:
            self.queued.pop(0)()


def test_disk_slower_than_the_source_limits_the_memory_of_a_download(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching, "_REST_BYTES", 1 << 16)
    monkeypatch.setattr(caching, "WriteBehind", LateWrites)
    tier = opened(server, cache)
    behind = tier._behind
    assert isinstance(behind, LateWrites)
    tier.complete(lambda _, read: read(), threading.Event())
    assert tier.get_settled_event().wait(60)
    tier.close()
    assert behind.most == caching._REST_AHEAD + 1
    assert cache.lookup(tier.revision) is not None


def test_queue_of_writes_is_waited_for() -> None:
    behind, permits, stop = WriteBehind(), threading.Semaphore(0), threading.Event()

    def write() -> None:
        permits.acquire()

    for _ in range(3):
        behind.submit(write)
    stop.set()
    behind.wait_until_at_most(3, stop)
    with pytest.raises(Cancelled):
        behind.wait_until_at_most(2, stop)
    permits.release(2)
    behind.wait_until_at_most(1)
    permits.release()
    behind.wait_until_drained()
    behind.close()


def test_read_after_the_close_of_a_tier_ends(server: TierServer, cache: SsdCache) -> None:
    """A read of a piece that another source has read meanwhile may begin that late."""
    tier = opened(server, cache)
    file = next(f for f in tier.files() if f.name == SHARD)
    tier.close()
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(Cancelled):
            tier.read_local(file, 0, memoryview(bytearray(100)))
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(30)


def test_read_after_the_close_of_a_partial_model_opens_no_file(server: TierServer, tmp_path: Path) -> None:
    source = HttpTier(f"{server.url}/m", QUICK)
    files = source.files()
    source.close()
    partial = PartialModel(tmp_path / "partial", "revision", "there", files, writes=True)
    partial.write(files[0], 0, memoryview(b"bytes"))
    partial.close()
    before = open_files()
    assert not partial.read(files[0], 0, memoryview(bytearray(5)))
    assert open_files() == before


def test_small_files_of_a_model_in_memory_outlive_its_copy_on_the_disk(server: TierServer, cache: SsdCache, tmp_path: Path) -> None:
    sources = Sources(cache, (tmp_path / "small",))
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    held = sources.open(f"{server.url}/m", tier.revision)
    assert held.directory is not None
    directory, checkpoint = sources.checkpoint(held, trust_remote_code=False)
    assert len(checkpoint.files) == 2
    held.close()
    assert cache.remove(tier.revision)
    for name in ("config.json", "tokenizer.json"):
        assert (directory / name).read_bytes() == (server.directory / "m" / name).read_bytes()


def test_model_in_the_cache_is_loaded_although_no_small_file_can_be_written(
    server: TierServer, cache: SsdCache, tmp_path: Path
) -> None:
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    (tmp_path / "file").write_text("no directory")
    sources = Sources(cache, (tmp_path / "file" / "small",))
    held = sources.open(f"{server.url}/m", tier.revision)
    directory, _ = sources.checkpoint(held, trust_remote_code=False)
    assert directory == held.directory
    held.close()


def test_pricing_of_weights_on_the_disk_is_no_use_of_them(server: TierServer, cache: SsdCache, tmp_path: Path) -> None:
    """A device prices its units by it; a stage has a part of the weights."""
    sources = Sources(cache, (tmp_path / "small",))
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    [before] = cache.entries()
    os.utime(cache.root / "entries" / tier.revision / store.ENTRY, (before.used - 1000, before.used - 1000))
    stage = part_id(tier.revision, LayerRange(first=0, end=1, total=2))
    assert [sources.is_on_disk(w) for w in (tier.revision, stage, part_id("0" * 32, None))] == [True, True, False]
    assert [e.used for e in cache.entries()] == [before.used - 1000]
