"""Ranges of addresses whose parts are mapped one after the other."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.contracts.segment import Extent
from shared.mapping import ReservedRange

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"".join(bytes([i]) * PAGE for i in range(4)))
    return tmp_path / "file"


def test_parts_are_mapped_at_their_places_and_may_be_replaced(file: Path) -> None:
    reserved = ReservedRange(3 * PAGE)
    fd = os.open(file, os.O_RDONLY)
    try:
        reserved.map(PAGE, fd, [Extent(offset=3 * PAGE, nbytes=PAGE), Extent(offset=PAGE, nbytes=PAGE)])
        assert [reserved.area[PAGE], reserved.area[2 * PAGE]] == [3, 1]
        reserved.map(0, fd, [Extent(offset=2 * PAGE, nbytes=2 * PAGE)])
        assert [reserved.area[i * PAGE] for i in range(3)] == [2, 3, 1]
        with pytest.raises(ValueError, match="do not fit"):
            reserved.map(2 * PAGE, fd, [Extent(offset=0, nbytes=2 * PAGE)])
        with pytest.raises(ValueError, match="do not fit"):
            reserved.map(0, fd, [Extent(offset=4 * PAGE, nbytes=PAGE)])
    finally:
        os.close(fd)


def test_a_read_of_a_part_that_is_not_mapped_ends_the_process() -> None:
    code = f"from shared.mapping import ReservedRange; print(ReservedRange({PAGE}).area[0])"
    ended = subprocess.run([sys.executable, "-X", "faulthandler=0", "-c", code], capture_output=True, check=False)
    assert ended.returncode == -11
    assert ended.stdout == b""
