"""The SSD cache of a remote source: stored, resumed, shared, verified, evicted.

If the disk fails, loads work without the cache.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from services.loader.adapters.cache_fill import CacheFill
from services.loader.adapters.cards import card_for
from shared.errors import CheckpointInvalid, Unavailable
from tests.integration.loader.cached_loads import SHARD, STEP, load, settle
from tests.integration.loader.checksums import write_sums
from tests.integration.loader.leftovers import without_leftovers
from tests.integration.loader.tiers_server import TierServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.cache import store
from weights.cache.caching import CachingTier
from weights.cache.locks import FileLock
from weights.cache.partial import PartialModel
from weights.cache.store import SsdCache
from weights.sources.sources import Sources
from weights.tiers.http import HttpTier
from weights.tiers.retry import Backoff
from weights.transfer.links import Links

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


def opened(server: TierServer, cache: SsdCache, *, pinned: bool = False) -> CachingTier:
    return CachingTier(HttpTier(f"{server.url}/m", QUICK), cache, pinned=pinned)


def test_loaded_model_is_cached_completely(server: TierServer, cache: SsdCache) -> None:
    tier = opened(server, cache)
    load(tier, (SHARD,))  # the rest arrives in the background
    settle(tier)
    directory = cache.lookup(tier.revision)
    assert directory is not None
    for file in tier.files():
        assert (directory / file.name).read_bytes() == (server.directory / "m" / file.name).read_bytes()
    status = cache.status()
    assert status.models == ((tier.revision, tier.source, status.nbytes),)
    assert not list((cache.root / "partial").iterdir())
    entry = cache.acquire(tier.revision)
    assert entry is not None
    assert all(f.sha256 for f in entry.record.files)
    assert not cache.remove(tier.revision), "it is held"
    entry.release()
    assert cache.remove(tier.revision)
    assert cache.status().models == ()


def test_an_interrupted_load_is_continued(server: TierServer, cache: SsdCache) -> None:
    tier = opened(server, cache)
    file = next(f for f in tier.files() if f.name == SHARD)
    data = bytearray(2 * STEP)
    tier.read(file, 0, memoryview(data))
    tier._behind.wait_until_drained()
    tier.close()
    assert cache.lookup(tier.revision) is None
    server.sent.clear()
    tier = opened(server, cache)
    found = load(tier)
    settle(tier)
    assert found[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    assert server.sent[f"/m/{SHARD}"] <= file.size - 2 * STEP + 200_000, "headers aside, only the rest"
    assert cache.lookup(tier.revision) is not None


def test_cached_pieces_lost_by_the_disk_are_fetched_again(server: TierServer, cache: SsdCache) -> None:
    """Pieces that the disk lost are fetched again.

    A machine that loses power may keep the journal's line and lose the bytes.
    """
    tier = opened(server, cache)
    load(tier, (SHARD,))
    tier._behind.wait_until_drained()
    tier.close()
    path = cache.get_partial_path(tier.revision) / SHARD
    with path.open("r+b") as file:
        file.seek(STEP + 5)
        file.write(b"\0" * 1000)
    with (cache.get_partial_path(tier.revision) / "journal").open("ab") as journal:
        journal.write(b"[1, 2")  # and half a line
    tier = opened(server, cache)
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    assert cache.lookup(tier.revision) is not None


def test_wrong_checksum_is_an_error_and_the_file_is_deleted(server: TierServer, cache: SsdCache) -> None:
    server.faults.damage = lambda data, start: data[:-1] + bytes([data[-1] ^ 1])
    tier = opened(server, cache)
    load(tier)
    try:
        with pytest.raises(CheckpointInvalid, match=r"m/model-0000[12]-of-00002.safetensors has the sha256 .* damaged") as caught:
            tier.finish()
    finally:
        tier.close()
    assert caught.value.should_retry
    assert cache.lookup(tier.revision) is None
    damaged = str(caught.value).split(" ", 1)[0].rsplit("/", 1)[1]
    assert not (cache.get_partial_path(tier.revision) / damaged).exists()
    server.faults.damage = None
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    assert cache.lookup(tier.revision) is not None


def test_a_changed_source_is_another_revision(server: TierServer, cache: SsdCache) -> None:
    one = opened(server, cache)
    server.faults.version = "2"
    two = opened(server, cache)
    assert one.revision != two.revision
    one.close()
    two.close()


def test_least_recently_used_model_is_evicted(server: TierServer, tmp_path: Path) -> None:
    size = sum(p.stat().st_size for p in (server.directory / "m").iterdir())
    cache = SsdCache(tmp_path / "small", int(2.5 * size))
    revisions = []
    for version in ("1", "2", "3", "4"):
        server.faults.version = version
        tier = opened(server, cache, pinned=version == "1")
        load(tier)
        settle(tier)
        revisions.append(tier.revision)
    assert [cache.lookup(r) is not None for r in revisions] == [True, False, False, True], "the pinned one and the last"
    assert cache.status().nbytes <= cache.budget
    entry = cache.acquire(revisions[3])
    server.faults.version = "5"
    tier = opened(server, cache)
    assert not tier.caches, "one is pinned, the other one is read"
    load(tier)
    settle(tier)
    assert entry is not None
    entry.release()


def test_concurrent_loads_do_not_share_the_same_free_space(server: TierServer, tmp_path: Path) -> None:
    size = sum(p.stat().st_size for p in (server.directory / "m").iterdir())
    cache = SsdCache(tmp_path / "small", int(1.5 * size))
    tiers = []
    for version in ("1", "2"):
        server.faults.version = version
        tiers.append(opened(server, cache))
    assert [t.caches for t in tiers] == [True, False], "the second is loaded without the cache"
    for version, tier in zip(("1", "2"), tiers, strict=True):
        server.faults.version = version
        load(tier)
        settle(tier)
    assert cache.status().nbytes <= cache.budget
    assert [cache.lookup(t.revision) is not None for t in tiers] == [True, False]
    server.faults.version = "3"
    third = opened(server, cache)
    assert third.caches, "what was promised is not held against the next one when it is there, or was given up"
    load(third)
    settle(third)
    assert [m[0] for m in cache.status().models] == [third.revision]


def test_held_eviction_lock_does_not_block_other_loaders(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_ROOM_WITHIN_S", 0.05)
    other = FileLock.take(cache.root / "locks" / "room")
    assert other is not None
    with other, caplog.at_level(logging.WARNING):
        tier = opened(server, cache)
    assert not tier.caches
    assert "another loader has been making room" in str(caplog.records[-1].__dict__)
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    tier = opened(server, cache)
    assert tier.caches
    load(tier)
    settle(tier)


def test_cache_budget_of_zero_disables_caching(server: TierServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = SsdCache(tmp_path / "none", 0)
    with caplog.at_level(logging.WARNING):
        tier = opened(server, cache)
    assert "no room in the SSD cache" in caplog.text
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    assert cache.status().models == ()


def test_write_error_stops_caching_and_deletes_the_partial_model(
    server: TierServer, cache: SsdCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, room = PartialModel.write, [2]

    def full(self: PartialModel, *args: object) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, *args)  # type: ignore[arg-type]  # forwarded unchanged

    monkeypatch.setattr(PartialModel, "write", full)
    tier = opened(server, cache)
    with caplog.at_level(logging.WARNING):
        assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
        settle(tier)
    assert any("No space left" in getattr(r, "error", "") for r in caplog.records)
    assert cache.lookup(tier.revision) is None
    assert not cache.get_partial_path(tier.revision).exists(), "what was written does not keep the disk full"


def test_thread_that_still_writes_does_not_make_a_removed_model_again(server: TierServer, tmp_path: Path) -> None:
    tier = HttpTier(f"{server.url}/m", QUICK)
    files = tier.files()
    tier.close()
    partial = PartialModel(tmp_path / "partial", "revision", "there", files, writes=True)
    try:
        partial.write(files[0], 0, memoryview(b"first"))
        partial.remove()
        with contextlib.suppress(OSError):
            partial.write(files[0], 5, memoryview(b"then"))
        with pytest.raises(FileNotFoundError):
            partial.write(files[1], 0, memoryview(b"other"))
    finally:
        partial.close()
    assert not (tmp_path / "partial").exists()


@pytest.mark.root
def test_full_disk_stops_caching_and_deletes_the_partial_model(
    server: TierServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        cache = SsdCache(disk / "cache", GIB)
        tier = opened(server, cache)
        assert tier.caches
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 16))
        with caplog.at_level(logging.WARNING):
            assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
            settle(tier)
        assert any("No space left" in getattr(r, "error", "") for r in caplog.records)
        assert cache.lookup(tier.revision) is None
        assert not cache.get_partial_path(tier.revision).exists()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_unwritable_cache_directory_disables_caching(server: TierServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no directory")
    cache = SsdCache(tmp_path / "file" / "cache", GIB)
    with caplog.at_level(logging.WARNING):
        tier = opened(server, cache)
    assert "cannot be written" in caplog.text
    load(tier)
    settle(tier)
    assert cache.acquire(tier.revision) is None


def test_failed_source_releases_the_fill_lock(server: TierServer, cache: SsdCache) -> None:
    tier = opened(server, cache)
    server.faults.status = 500
    with pytest.raises(Unavailable, match="500"):
        load(tier)
    tier.close()
    lock = cache.try_fill_lock(tier.revision)
    assert lock is not None
    lock.release()


def test_a_second_load_follows_the_first(server: TierServer, cache: SsdCache) -> None:
    first, second = opened(server, cache), opened(server, cache)
    assert (first.caches, second.caches) == (True, False)
    server.sent.clear()
    found: dict[str, bytes] = {}
    thread = threading.Thread(target=lambda: found.update(load(second)))
    thread.start()
    load(first)
    thread.join(60)
    assert found[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    size = (server.directory / "m" / SHARD).stat().st_size
    assert server.sent[f"/m/{SHARD}"] <= size + 200_000, "it was fetched once"
    settle(first)
    settle(second)
    assert cache.lookup(first.revision) is not None


def test_follower_takes_over_an_abandoned_fill(server: TierServer, cache: SsdCache) -> None:
    first, second = opened(server, cache), opened(server, cache)
    file = next(f for f in first.files() if f.name == SHARD)
    data = bytearray(STEP)
    first.read(file, 0, memoryview(data))
    first._behind.wait_until_drained()
    found: dict[str, bytes] = {}
    thread = threading.Thread(target=lambda: found.update(load(second)))
    thread.start()
    first.close()  # gives up
    thread.join(60)
    assert found[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    assert second.caches
    settle(second)
    assert cache.lookup(second.revision) is not None


def test_follower_reads_the_source_after_its_patience(server: TierServer, cache: SsdCache) -> None:
    first = opened(server, cache)
    second = CachingTier(HttpTier(f"{server.url}/m", QUICK), cache, patience_s=0.1)
    assert load(second, (SHARD,))[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    first.close()
    settle(second)


@pytest.mark.parametrize("ends", ["complete", "given up"])
def test_a_download_to_the_disk_waits_for_another_process_and_takes_over_from_it(
    server: TierServer, cache: SsdCache, ends: str
) -> None:
    first, card = opened(server, cache), card_for("http://s/m", "0" * 32, 1)
    fill = CacheFill(cast(Sources, SimpleNamespace(open=lambda *_, **__: opened(server, cache))), links := Links("fair"), 2)
    done = fill.begin(card)
    load(first)
    assert not done.done()
    if ends == "complete":
        settle(first)
    else:
        first.close()
    assert not done.result(60)
    assert cache.lookup(first.revision) is not None
    fill.close()
    links.close()


def test_a_download_that_waits_for_another_process_does_not_delay_the_next_one(server: TierServer, cache: SsdCache) -> None:
    write_checkpoint(server.directory / "n", tensors(megabytes=1))
    write_sums(server.directory / "n")
    first = opened(server, cache)

    def open_source(source: str, *_: object, **__: object) -> CachingTier:
        return CachingTier(HttpTier(server.url + source.removeprefix("http://s"), QUICK), cache)

    fill = CacheFill(cast(Sources, SimpleNamespace(open=open_source)), links := Links("fair"), 2)
    followed = fill.begin(card_for("http://s/m", "0" * 32, 1))
    assert not fill.begin(card_for("http://s/n", "1" * 32, 1)).result(60)
    assert [source.rpartition("/")[2] for _, source, _ in cache.status().models] == ["n"]
    assert not followed.done()
    first.close()
    assert not followed.result(60)
    assert cache.lookup(first.revision) is not None
    fill.close()
    links.close()


def test_a_download_to_the_disk_waits_no_longer_than_its_patience(server: TierServer, cache: SsdCache) -> None:
    first = opened(server, cache)
    second = CachingTier(HttpTier(f"{server.url}/m", QUICK), cache, patience_s=0.1)
    second.wait_for_other_process(threading.Event())
    assert not second.caches
    second.close()
    third, cancelled = CachingTier(HttpTier(f"{server.url}/m", QUICK), cache, patience_s=3600.0), threading.Event()
    cancelled.set()
    third.wait_for_other_process(cancelled)
    assert not third.caches
    third.close()
    first.close()


def test_load_of_a_part_does_not_wait_for_the_load_of_another_part(server: TierServer, cache: SsdCache) -> None:
    first = opened(server, cache)
    second = CachingTier(HttpTier(f"{server.url}/m", QUICK), cache, follows=False, patience_s=3600.0)
    found: dict[str, bytes] = {}
    thread = threading.Thread(target=lambda: found.update(load(second, (SHARD,))), daemon=True)
    thread.start()
    thread.join(60)
    assert found[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    first.close()
    second.close()


def test_load_of_a_part_leaves_its_ranges_to_a_load_of_the_whole(server: TierServer, cache: SsdCache) -> None:
    part = opened(server, cache)
    load(part, (SHARD,))
    part.finish_part()
    assert part.get_settled_event().wait(60)
    part.close()
    server.sent.clear()
    whole = opened(server, cache)
    assert whole.caches, "the part is no longer being fetched"
    load(whole)
    assert server.sent.get(f"/m/{SHARD}", 0) < 200_000
    settle(whole)
    assert cache.lookup(whole.revision) is not None


def test_load_of_a_model_cached_meanwhile_reads_the_cache(server: TierServer, cache: SsdCache) -> None:
    tier = opened(server, cache)
    load(tier)
    settle(tier)
    server.sent.clear()
    late = opened(server, cache)
    assert late.caches is False
    load(late)
    assert server.sent.get(f"/m/{SHARD}", 0) < 200_000
    settle(late)


def test_locks_are_released_by_their_holder(tmp_path: Path) -> None:
    one = FileLock.take(tmp_path / "lock")
    assert one is not None
    assert FileLock.take(tmp_path / "lock") is None
    assert FileLock.take(tmp_path / "lock", shared=True) is None
    one.release()
    one.release()
    shared = [FileLock.take(tmp_path / "lock", shared=True) for _ in range(2)]
    for lock in shared:
        assert lock is not None
        lock.release()
