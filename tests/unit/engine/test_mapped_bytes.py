"""Weights of a detached model that an executor still maps."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.executor import UNMAPPED_WITHIN_S, AddressRange, mapped_bytes, wait_until_unmapped
from services.nodeagent.effects import _DETACHES_WITHIN_S

CHECK_S = 0.65
"""Time of a check on a busy machine."""
PAGES = 8
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[AddressRange]:
    """Map a file between other mappings, and return its addresses."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(PAGES * PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as area:
        anchor = ctypes.c_char.from_buffer(area)
        start = ctypes.addressof(anchor)
        yield start, start + PAGES * PAGE
        del anchor


def test_mapped_files_count_in_the_ranges_only(weights: AddressRange) -> None:
    start, _ = weights
    assert mapped_bytes([weights]) == PAGES * PAGE
    assert mapped_bytes([(start + PAGE, start + 3 * PAGE)]) == 2 * PAGE
    assert mapped_bytes([]) == 0


def test_each_part_of_a_range_with_several_mappings_counts(weights: AddressRange) -> None:
    start, _ = weights
    assert _libc.mprotect(start + 2 * PAGE, PAGE, mmap.PROT_READ) == 0, "the kernel keeps three mappings now"
    assert mapped_bytes([weights]) == PAGES * PAGE
    assert _libc.mprotect(start + 2 * PAGE, PAGE, 0) == 0
    assert mapped_bytes([weights]) == (PAGES - 1) * PAGE, "mapped without access"


def test_ranges_that_others_use_do_not_count(weights: AddressRange) -> None:
    start, end = weights
    assert mapped_bytes([weights], [weights]) == 0
    assert mapped_bytes([weights], [(start + PAGE, end)]) == 0
    assert mapped_bytes([weights], [(end, end + PAGE)]) == PAGES * PAGE


def test_anonymous_memory_does_not_count() -> None:
    with mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        anchor = ctypes.c_char.from_buffer(area)
        start = ctypes.addressof(anchor)
        assert mapped_bytes([(start, start + PAGES * PAGE)]) == 0
        del anchor


async def test_pause_of_the_process_is_no_time_in_which_weights_are_unmapped(weights: AddressRange) -> None:
    """Objects that hold the weights are released by tasks, which did not run either."""
    checks, (start, _) = itertools.count(1), weights

    def count_bytes() -> int:
        check = next(checks)
        if check == 1:
            asyncio.get_running_loop().call_soon(time.sleep, UNMAPPED_WITHIN_S + 0.1)
        if check == 4:
            assert _libc.mprotect(start, PAGES * PAGE, 0) == 0
        return mapped_bytes([weights])

    assert await wait_until_unmapped(count_bytes, time.monotonic() + 60) == 0
    assert next(checks) == 5


async def test_a_pause_until_shortly_before_the_deadline_is_followed_by_checks() -> None:
    """The answer may still be in time."""
    checks, now_s = itertools.count(1), [0.0]

    def count_bytes() -> int:
        check = next(checks)
        if check == 1:
            now_s[0] = _DETACHES_WITHIN_S - 0.5
        return PAGE if check < 4 else 0

    assert await wait_until_unmapped(count_bytes, _DETACHES_WITHIN_S, lambda: now_s[0]) == 0


async def test_the_nodeagent_is_answered_in_time_although_every_check_is_slow() -> None:
    """It kills an executor that does not answer, and all models in it."""
    now_s = [0.0]

    def count_bytes() -> int:
        now_s[0] += CHECK_S
        return PAGE

    assert await wait_until_unmapped(count_bytes, _DETACHES_WITHIN_S, lambda: now_s[0]) == PAGE
    assert now_s[0] < _DETACHES_WITHIN_S
