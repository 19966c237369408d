"""The pieces of a partial model in the SSD cache."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from tests.support.descriptors import open_files
from weights.cache.partial import PartialModel
from weights.tiers.port import TierFile

_BYTES = bytes(range(256)) * 64
_HALF = len(_BYTES) // 2
FILE = TierFile("model.safetensors", len(_BYTES), "1")


def open_partial(directory: Path, *, writes: bool = True) -> PartialModel:
    return PartialModel(directory, "0" * 40, "s3://b/m", [FILE], writes=writes)


def damage(directory: Path) -> None:
    """Have the disk lose the bytes of the file, as a power cut does, and keep the journal."""
    (directory / FILE.name).write_bytes(bytes(len(_BYTES)))


def test_a_shorter_piece_in_place_of_a_damaged_one_is_not_read_as_all_of_it(tmp_path: Path) -> None:
    first = open_partial(tmp_path)
    first.write(FILE, 0, memoryview(_BYTES))
    first.close()
    damage(tmp_path)
    second, half = open_partial(tmp_path), memoryview(bytearray(_HALF))
    assert not second.read(FILE, 0, half)
    second.write(FILE, 0, memoryview(_BYTES)[:_HALF])
    second.close()
    third, whole = open_partial(tmp_path), memoryview(bytearray(len(_BYTES)))
    assert not third.read(FILE, 0, whole)
    assert third.read(FILE, 0, half)
    assert bytes(half) == _BYTES[:_HALF]
    assert third.list_missing(FILE) == [(_HALF, len(_BYTES))]
    third.close()


def test_a_reader_gets_no_bytes_of_a_piece_that_another_one_found_damaged(tmp_path: Path) -> None:
    """Each of two threads reads a half of the damaged piece: neither may take it for read."""
    partial, found = open_partial(tmp_path), list[bool]()
    partial.write(FILE, 0, memoryview(_BYTES))
    damage(tmp_path)
    has, both_know = partial.has, threading.Barrier(2)

    def has_and_wait(file: TierFile, offset: int, length: int) -> bool:
        known = has(file, offset, length)
        both_know.wait(60)
        if offset:  # the other thread has removed the piece meanwhile
            first.join()
        return known

    def read(offset: int) -> None:
        found.append(partial.read(FILE, offset, memoryview(bytearray(_HALF))))

    partial.has = has_and_wait  # type: ignore[method-assign]
    first, second = threading.Thread(target=read, args=(0,)), threading.Thread(target=read, args=(_HALF,))
    first.start()
    second.start()
    second.join()
    assert found == [False, False]
    partial.close()


def test_space_of_a_removed_model_is_free_while_its_files_are_open(tmp_path: Path) -> None:
    """The disk is full, and the load continues from the source."""
    partial = open_partial(tmp_path / "m")
    partial.write(FILE, 0, memoryview(_BYTES))
    with (tmp_path / "m" / FILE.name).open("rb") as file:
        partial.remove()
        assert os.fstat(file.fileno()).st_blocks == 0
    assert not (tmp_path / "m").exists()
    assert not partial.read(FILE, 0, memoryview(bytearray(len(_BYTES))))
    partial.close()


def test_files_of_a_partial_model_that_became_an_entry_are_kept(tmp_path: Path) -> None:
    """A write after that fails, as for a full disk."""
    partial = open_partial(tmp_path / "m")
    partial.write(FILE, 0, memoryview(_BYTES))
    (tmp_path / "m").rename(tmp_path / "entry")
    partial.remove()
    assert (tmp_path / "entry" / FILE.name).read_bytes() == _BYTES
    partial.close()


def test_a_full_disk_leaves_no_descriptor_open(tmp_path: Path) -> None:
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), open_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            open_partial(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files() <= before
