"""Page cache queries have no side effect.

A load from a cold disk leaves nothing in the page cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from weights.tensors import load_tensors
from weights.transfer.page_cache import cached_bytes

SIZE = 64 * 1024 * 1024


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def cached(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        nbytes = cached_bytes(fd, 0, path.stat().st_size)
    finally:
        os.close(fd)
    if nbytes is None:
        pytest.skip("this kernel does not report the page cache (Linux 6.5 does)")
    return nbytes


def test_read_pages_are_cached_and_dropped_pages_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    drop(path)
    if cached(path):
        pytest.skip("this file system keeps its pages")
    path.read_bytes()
    assert cached(path) >= 0.9 * SIZE  # the kernel may evict pages at any time


def test_closed_descriptor_is_an_error() -> None:
    fd = os.open("/", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        cached_bytes(fd, 0, 1)


def test_load_from_a_cold_disk_does_no_readahead(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    save_file({"weight": weight}, path)
    drop(path)
    if cached(path):
        pytest.skip("this file system keeps its pages")
    loaded = load_tensors(path)
    assert np.array_equal(loaded["weight"].numpy(), weight)
    # The header was read through the cache, with the kernel's read-ahead: look beyond that.
    fd = os.open(path, os.O_RDONLY)
    try:
        assert (cached_bytes(fd, SIZE // 2, SIZE // 4) or 0) == 0
    finally:
        os.close(fd)
