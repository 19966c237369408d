"""Reads into shared memory: all bytes from any place, no leftovers after errors."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.contracts.segment import PAGE
from shared.errors import CheckpointInvalid, InsufficientMemory
from tests.support.descriptors import open_files
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from tests.unit.loader.page_cache import evict
from tests.unit.loader.segments import assert_same
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import Layout, lay_out
from weights.load import load_segment
from weights.pool import shm
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.shm import SHM
from weights.tiers.port import Cancelled
from weights.transfer.pieces import cut
from weights.transfer.populating import Populating
from weights.transfer.reader import ReadOptions


@pytest.fixture
def name() -> Iterator[str]:
    segment = f"thaw-test-{os.getpid()}"
    before = open_files()
    yield segment
    (SHM / segment).unlink(missing_ok=True)
    assert open_files() <= before
    assert segment not in Path("/proc/self/maps").read_text()


@contextmanager
def cached(directory: Path) -> Iterator[None]:
    """Keep the files in the page cache."""
    with contextlib.ExitStack() as stack:
        for path in directory.iterdir():
            stack.enter_context(locked(path, (0, path.stat().st_size)))
        yield


@contextmanager
def locked(path: Path, *ranges: tuple[int, int]) -> Iterator[None]:
    """Keep ranges of a file (offset and length in bytes) in the page cache, and read no other page.

    A machine short of memory evicts pages that were only read. Where the limit of locked memory
    refuses the lock, the mapping alone makes that unlikely.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        mapping.madvise(mmap.MADV_RANDOM)  # no read-ahead
        start = np.frombuffer(mapping, np.uint8).ctypes.data
        for offset, length in ranges:
            first = offset // PAGE * PAGE
            libc.mlock(ctypes.c_void_p(start + first), ctypes.c_size_t(offset + length - first))
            sum(mapping[offset : offset + length : PAGE])
        yield


def need_disk(directory: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True, check=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"temporary files lie on {kind}, whose pages never leave the page cache (set TMPDIR to a disk)")


@pytest.mark.parametrize("shards", [1, 3])
def test_cold_and_cached_loads_give_the_same_bytes(tmp_path: Path, name: str, shards: int) -> None:
    need_disk(tmp_path)
    weights = write_checkpoint(tmp_path, tensors(megabytes=50), shards=shards)
    for _ in range(2):
        evict(tmp_path)
        report = load_segment(tmp_path, name)
        assert report.stats.direct > 0
        assert_same(name, weights)
        (SHM / name).unlink()
        with cached(tmp_path):
            report = load_segment(tmp_path, name, ReadOptions(threads=1))
        assert report.stats.cached > 0
        assert report.stats.direct == 0
        assert_same(name, weights)
        (SHM / name).unlink()


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, CHUNK_BYTES - 100, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_any_length_of_file(tmp_path: Path, name: str, size: int) -> None:
    weights = {"w": np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)}
    write_checkpoint(tmp_path, weights)
    evict(tmp_path)
    report = load_segment(tmp_path, name)
    assert_same(name, weights)
    stats = report.stats
    assert stats.direct + stats.cached + stats.buffered == (tmp_path / "model.safetensors").stat().st_size


def test_half_in_the_page_cache(tmp_path: Path, name: str) -> None:
    need_disk(tmp_path)
    weights = write_checkpoint(tmp_path, tensors(megabytes=60))
    evict(tmp_path)
    _, second, *whole = cut(lay_out(open_checkpoint(tmp_path), ""))[:6]
    nbytes = sum(piece.length for piece in whole)
    with (tmp_path / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        ranges = ((0, 3 * PAGE), (second.offset + 5 * PAGE, 100), (whole[0].offset, nbytes))
        for offset, length in ranges:
            os.pread(file.fileno(), length, offset)
        with locked(tmp_path / "model.safetensors", *ranges):
            report = load_segment(tmp_path, name)
    assert report.stats.cached >= nbytes
    assert report.stats.direct > CHUNK_BYTES
    assert_same(name, weights)


def test_a_file_system_without_direct_reads(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=20))
    evict(tmp_path)
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    report = load_segment(tmp_path, name)
    monkeypatch.undo()
    assert report.stats.direct == 0
    assert_same(name, weights)


def test_files_in_shared_memory_are_loaded(name: str) -> None:
    directory = SHM / f"{name}-files"
    try:
        weights = write_checkpoint(directory, tensors(megabytes=20))
        load_segment(directory, name)
        assert_same(name, weights)
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def test_watermark_grows_to_the_end(tmp_path: Path, name: str) -> None:
    """The watermark grows to the end, and every byte below it is loaded.

    Pieces arrive in any order.
    """
    weights = write_checkpoint(tmp_path, tensors(megabytes=90), shards=2)
    seen: list[tuple[int, int]] = []

    def check_watermark(watermark: int) -> None:
        """Check the watermark; called by several threads at once."""
        with (SHM / name).open("rb") as file:
            seen.append((watermark, os.lseek(file.fileno(), 0, os.SEEK_HOLE)))

    report = load_segment(tmp_path, name, ReadOptions(chunk_bytes=1 << 20), on_loaded=check_watermark)
    assert max(seen)[0] == report.total_bytes
    assert len({watermark for watermark, _ in seen}) > 3
    assert all(there >= watermark for watermark, there in seen)
    assert_same(name, weights)


def test_index_is_written_before_the_data(tmp_path: Path, name: str) -> None:
    weights = write_checkpoint(tmp_path)

    def check_index(layout: Layout) -> None:
        assert layout.header.total_bytes == layout.total_bytes
        assert (SHM / name).read_bytes()[: len(layout.head)] == layout.head

    load_segment(tmp_path, name, on_index=check_index)
    assert_same(name, weights)


def test_called_off_within_a_chunk(tmp_path: Path, name: str) -> None:
    write_sparse_checkpoint(tmp_path, 64 * CHUNK_BYTES)
    cancelled = threading.Event()
    progress: list[int] = []

    def on_loaded(count: int) -> None:
        cancelled.set()  # first: this thread may wait for a processor while the other one reads
        progress.append(count)

    with pytest.raises(Cancelled):
        load_segment(tmp_path, name, ReadOptions(threads=2), cancelled=cancelled, on_loaded=on_loaded)
    assert len(progress) <= 2
    assert not (SHM / name).exists()


@pytest.mark.parametrize("change", ["shrink", "grow", "touch"])
def test_file_that_changes_during_the_read_is_refused(tmp_path: Path, name: str, change: str) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=50))
    evict(tmp_path)
    path = tmp_path / "model.safetensors"
    has_changed = False

    def on_loaded(_: int) -> None:
        nonlocal has_changed
        if not has_changed:
            has_changed = True
            if change == "touch":
                os.utime(path, ns=(1, 1))
            else:
                os.truncate(path, path.stat().st_size + (-1_000_000 if change == "shrink" else 1))

    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors (changed|shrank)"):
        load_segment(tmp_path, name, ReadOptions(threads=1), on_loaded=on_loaded)
    assert not (SHM / name).exists()


def test_file_that_changed_after_its_header_is_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(CheckpointInvalid, match="changed after its header was read"):
        load_segment(tmp_path, name, on_layout=lambda _: os.utime(tmp_path / "model.safetensors", ns=(1, 1)))
    assert not (SHM / name).exists()


def test_a_failing_disk_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=40))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors cannot be read: Input/output error"):
        load_segment(tmp_path, name)
    assert not (SHM / name).exists()


def test_no_room_at_all(tmp_path: Path, name: str) -> None:
    write_sparse_checkpoint(tmp_path, 2**43)
    with pytest.raises(InsufficientMemory, match=r"enlarge it") as caught:
        load_segment(tmp_path, name)
    assert caught.value.should_retry is False
    assert not (SHM / name).exists()


def test_load_without_free_memory_may_be_retried(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(shm, "available_memory", lambda: 1000)
    with pytest.raises(InsufficientMemory, match="put other models to sleep") as caught:
        load_segment(tmp_path, name)
    assert caught.value.should_retry is True


def test_memory_that_runs_out_during_the_load_leaves_no_segment(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_disk(tmp_path)
    write_checkpoint(tmp_path, tensors(megabytes=60))
    evict(tmp_path)
    real, given = os.posix_fallocate, 0

    def some(fd: int, offset: int, length: int) -> None:
        nonlocal given
        given += length
        if given > 2 * CHUNK_BYTES:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", some)
    with pytest.raises(InsufficientMemory, match="/dev/shm"):
        load_segment(tmp_path, name)
    assert not (SHM / name).exists()


def test_memory_that_runs_out_during_page_cache_copies_leaves_no_segment(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=60))
    for path in tmp_path.iterdir():
        path.read_bytes()
    real, given = os.pwrite, 0

    def some(fd: int, data: bytes, offset: int) -> int:
        nonlocal given
        given += len(data)
        if given > CHUNK_BYTES:
            raise OSError(28, "No space left on device")
        return real(fd, data[: max(1, len(data) // 2)], offset)  # short writes are continued

    monkeypatch.setattr(os, "pwrite", some)
    monkeypatch.setattr(Populating, "uses_small_pages", True)
    with pytest.raises(InsufficientMemory, match="/dev/shm"):
        load_segment(tmp_path, name)
    monkeypatch.undo()
    assert not (SHM / name).exists()
    load_segment(tmp_path, name)  # no reservation is left


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(direct=False),
        ReadOptions(populate=False),
        ReadOptions(threads=8, chunk_bytes=1024 * PAGE),
        ReadOptions(threads=1),
    ],
)
def test_every_read_method_gives_the_same_bytes(tmp_path: Path, name: str, options: ReadOptions) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=40), shards=2)
    evict(tmp_path)
    report = load_segment(tmp_path, name, options)
    assert options.direct or report.stats.direct == 0
    assert_same(name, weights)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"threads": 0}, "at least one"), ({"chunk_bytes": 0}, "multiple"), ({"chunk_bytes": 5000}, "multiple")]
)
def test_invalid_read_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReadOptions(**wrong)
