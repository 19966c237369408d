"""The pool's memory: chunks are allocated and freed with proof.

Mappings of a chunk are found by offset.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.loader.adapters.reclaim import Reclaimer
from services.loader.domain.effects import Vacate
from services.loader.domain.events import Event, Reclaimed, Vacated, VacateFailed
from shared.contracts.segment import Extent
from shared.mapping import map_extents
from tests.support.descriptors import open_files
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.page_cache import evict
from tests.unit.loader.pools import fill, mapper
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.pool.region import Region, extents
from weights.pool.shm import SHM

COUNT = 12


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    before = open_files()
    pool = PoolMemory(f"thaw-test-pool-{os.getpid()}", COUNT * CHUNK_BYTES)
    yield pool
    name = pool.path.name
    pool.close(unlink=True)
    assert not (SHM / name).exists()
    assert name not in Path("/proc/self/maps").read_text()
    assert open_files() <= before


def resident(pool: PoolMemory, what: str = "Rss") -> int:
    """Return the pool's bytes in this process's own page tables."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = pool.path.name in line
        elif inside and line.startswith(f"{what}:"):
            found += int(line.split()[1]) * 1024
    return found


def mapped_huge(pool: PoolMemory) -> int:
    return resident(pool, "ShmemPmdMapped")


def test_a_sparse_pool_costs_no_memory_and_chunks_are_allocated_and_freed(pool: PoolMemory) -> None:
    assert pool.count_allocated() == 0
    pool.populate(3 * CHUNK_BYTES, CHUNK_BYTES)
    pool.allocate(5 * CHUNK_BYTES, 8192)
    assert pool.count_allocated() == CHUNK_BYTES + 8192
    assert pool.punch([5]) == 8192
    assert pool.punch([1, 2, 3, 4]) == CHUNK_BYTES
    assert pool.count_allocated() == 0


def test_scattered_chunks_are_contiguous_for_a_reader(pool: PoolMemory, tmp_path: Path) -> None:
    """Scattered chunks are one contiguous range for a reader, without a copy.

    A tensor larger than two chunks is contiguous; the reader sees the loader's pages.
    """
    weights: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
        "big": np.random.default_rng(1).integers(0, 255, 40_000_000, dtype=np.uint8),
        "small": np.arange(7, dtype=np.float32),
    }
    write_checkpoint(tmp_path, weights)
    region = fill(pool, tmp_path, (7, 8, 2, 5))
    assert region.extents == (
        Extent(offset=7 * CHUNK_BYTES, nbytes=2 * CHUNK_BYTES),
        extents((2,), region.nbytes - 2 * CHUNK_BYTES)[0],
    )
    mapped = map_extents(pool.path, region.extents)
    at = bytes(mapped).index(weights["big"][:64].tobytes())
    assert np.array_equal(np.frombuffer(mapped, np.uint8, 40_000_000, at), weights["big"])
    mapped.close()


def test_complete_chunks_are_unmapped_from_the_loader(pool: PoolMemory, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=40))
    region = fill(pool, tmp_path, (0, 1, 2))
    assert resident(pool) == 0
    assert pool.count_allocated() == region.nbytes


def test_pinned_chunks_stay_mapped_and_are_unpinned_before_they_are_freed(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    pool = PoolMemory(
        None,
        2 * CHUNK_BYTES,
        on_populated=lambda a, n: calls.append(("lock", a, n)),
        on_punch=lambda a, n: calls.append(("unlock", a, n)),
    )
    pool.prepare(1)
    pool.zap(1)
    assert pool.punch([1]) == CHUNK_BYTES
    (first, address, length), second = calls
    assert (first, length) == ("lock", CHUNK_BYTES)
    assert second == ("unlock", address, CHUNK_BYTES)
    pool.close()


@pytest.mark.parametrize("cold", [True, False])
def test_a_prepared_chunk_is_not_allocated_again(
    pool: PoolMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    weights, real = write_checkpoint(tmp_path, tensors(megabytes=30)), os.pwrite
    for path in tmp_path.iterdir():
        path.read_bytes()
    if cold:
        evict(tmp_path)
    for chunk in (0, 1):
        pool.prepare(chunk)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("memory that is there is asked for again"))
    if not cold:  # straight from the page cache: no other copy
        monkeypatch.setattr(
            os, "pwrite", lambda fd, data, at: real(fd, data, at) if len(data) < 100_000 else pytest.fail("copied twice")
        )
    region = fill(pool, tmp_path, (0, 1))
    mapped = map_extents(pool.path, region.extents)
    for value in weights.values():
        assert value.tobytes() in bytes(mapped)
    mapped.close()


def test_processes_that_map_a_chunk_are_found_by_its_offset(pool: PoolMemory) -> None:
    assert pool.mapped_by_others() == {}
    with mapper(pool.path, extents((4, 9), CHUNK_BYTES + 5)) as process:
        assert pool.mapped_by_others() == {4: [process.pid], 9: [process.pid]}
    assert pool.mapped_by_others() == {}


class Shell:
    """Collects effects."""

    def __init__(self, pool: PoolMemory, wait: float) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.reclaimer = Reclaimer(pool, self.events.put, wait)

    def next(self) -> Event:
        return self.events.get(timeout=60)


@pytest.fixture
def shell(pool: PoolMemory) -> Iterator[Shell]:
    shell = Shell(pool, 0.3)
    yield shell
    shell.reclaimer.close()


def test_unmapped_memory_is_freed(pool: PoolMemory, shell: Shell) -> None:
    for chunk in (1, 2):
        pool.prepare(chunk)
    shell.reclaimer.start(Vacate(7, (1, 2), 2 * CHUNK_BYTES, 1, "w"))
    assert isinstance(shell.next(), Vacated)
    assert shell.next() == Reclaimed("w", 7, CHUNK_BYTES, CHUNK_BYTES)
    assert pool.count_allocated() == CHUNK_BYTES
    assert resident(pool) == CHUNK_BYTES  # ready for the next load


def test_memory_is_not_reported_free_while_a_process_maps_it(pool: PoolMemory, shell: Shell) -> None:
    pool.prepare(3)
    with mapper(pool.path, extents((3,), 4096)) as process:
        assert process.stdin is not None
        shell.reclaimer.start(Vacate(1, (3,), CHUNK_BYTES, 0, "w"))
        assert shell.next() == Reclaimed("w", 1, 0)
        assert pool.count_allocated() == CHUNK_BYTES
        process.stdin.write(b"\n")  # it unmaps, and continues
        process.stdin.flush()
        assert isinstance(shell.next(), Vacated)
        assert pool.count_allocated() == 0


def test_mappings_that_cannot_be_read_for_a_moment_end_no_watch(pool: PoolMemory, shell: Shell) -> None:
    pool.prepare(3)
    with mapper(pool.path, extents((3,), 4096)) as process, pytest.MonkeyPatch.context() as broken:
        assert process.stdin is not None
        shell.reclaimer.start(Vacate(1, (3,), CHUNK_BYTES, 0, "w"))
        assert shell.next() == Reclaimed("w", 1, 0)
        failed = threading.Event()

        def fail(_: PoolMemory, chunks: object) -> frozenset[int]:
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")

        broken.setattr(PoolMemory, "mapped_among", fail)
        assert failed.wait(60)
        broken.undo()
        process.stdin.write(b"\n")  # it unmaps, and continues
        process.stdin.flush()
        assert isinstance(shell.next(), Vacated)


def test_reclaim_waits_for_a_mapping_that_ends_in_time(pool: PoolMemory) -> None:
    pool.prepare(3)
    shell = Shell(pool, 10)
    with mapper(pool.path, extents((3,), 4096)) as process:
        killer = threading.Timer(0.1, process.kill)
        killer.start()
        shell.reclaimer.start(Vacate(1, (3,), CHUNK_BYTES, 0, "w"))
        assert isinstance(shell.next(), Vacated)
        assert shell.next() == Reclaimed("w", 1, CHUNK_BYTES)
        killer.join()
    shell.reclaimer.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open descriptors until the next one exceeds 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in taken:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_mapping_is_waited_for_by_a_loader_of_many_connections(
    pool: PoolMemory, many_descriptors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.prepare(3)
    shell, real = Shell(pool, 10), pool.mapped_by_others
    with mapper(pool.path, extents((3,), 4096)) as process:

        def seen() -> dict[int, list[int]]:
            found = real()
            process.kill()
            return found

        monkeypatch.setattr(pool, "mapped_by_others", seen)
        shell.reclaimer.start(Vacate(1, (3,), CHUNK_BYTES, 0, "w"))
        assert isinstance(shell.next(), Vacated)
        assert shell.next() == Reclaimed("w", 1, CHUNK_BYTES)
    shell.reclaimer.close()


def test_a_failure_to_free_memory_is_reported(pool: PoolMemory, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.prepare(3)

    def fail(chunks: object) -> int:
        raise OSError(errno.EBUSY, "memory was touched while it was given back")

    monkeypatch.setattr(pool, "punch", fail)
    shell.reclaimer.start(Vacate(1, (3,), CHUNK_BYTES, 0, "w"))
    assert isinstance(shell.next(), VacateFailed)
    assert shell.next() == Reclaimed("w", 1, 0)


def test_memory_of_a_failed_load_is_freed_although_chunks_cannot_be_kept_ready(
    pool: PoolMemory, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load may have failed because shared memory is full."""
    pool.prepare(1)  # the load has populated no more
    prepare = pool.prepare

    def prepare_in_full_memory(chunk: int) -> None:
        if chunk != 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        prepare(chunk)

    monkeypatch.setattr(pool, "prepare", prepare_in_full_memory)
    shell.reclaimer.start(Vacate(7, (1, 2, 3), 3 * CHUNK_BYTES, 2, "w"))
    vacated = shell.next()
    assert isinstance(vacated, Vacated)
    assert (vacated.run, vacated.kept) == (7, 1)
    assert shell.next() == Reclaimed("w", 7, 0, CHUNK_BYTES)
    assert pool.count_allocated() == CHUNK_BYTES


def test_memory_touched_while_it_is_freed_is_an_error(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.prepare(0)
    real = os.lseek

    def touched(fd: int, position: int, how: int) -> int:
        if how == os.SEEK_DATA:
            os.pwrite(fd, b"x", 0)
        return real(fd, position, how)

    monkeypatch.setattr(os, "lseek", touched)
    with pytest.raises(OSError, match="was touched"):
        pool.punch([0])


def test_views_of_a_region_stay_within_their_chunk(pool: PoolMemory) -> None:
    region = Region(pool, (6, 1), CHUNK_BYTES + 10)
    region.write(CHUNK_BYTES - 3, b"abcdef")
    with region.view(CHUNK_BYTES - 3, 3) as low, region.view(CHUNK_BYTES, 3) as high:
        assert (bytes(low), bytes(high)) == (b"abc", b"def")
    with pool.view(1 * CHUNK_BYTES, 3) as raw:
        assert bytes(raw) == b"def"


def test_prepared_chunks_use_huge_pages(pool: PoolMemory) -> None:
    """Prepared chunks use huge pages, whatever /dev/shm's mount options.

    Exceptions are kernels before 6.7, those configured to deny it, and too little free memory.
    """
    if not pool.prepare_huge(1):
        pytest.skip("this kernel gives shared memory no huge pages, or has too few now")
    assert mapped_huge(pool) == pool.count_allocated() == CHUNK_BYTES
    pool.zap(1)
    assert resident(pool) == 0
    with pool.view(CHUNK_BYTES, CHUNK_BYTES) as view:
        view[:5] = b"there"
    pool.zap(1)
    pool.populate(2 * CHUNK_BYTES, CHUNK_BYTES)  # in small pages first
    pool.zap(2)
    if not pool.prepare_huge(2):
        pytest.skip("this kernel has too few huge pages now")
    assert mapped_huge(pool) == CHUNK_BYTES
    with pool.view(CHUNK_BYTES, 5) as view:
        assert bytes(view) == b"there"
    assert pool.punch([1]) == CHUNK_BYTES
    assert pool.punch([2]) == CHUNK_BYTES
