"""The lock of a mapping lives as long as the mapping, in whichever process."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.file_locks import is_locked, lock_mapped, unlock_mapped
from tests.support.launcher import until
from tests.support.stopping import killed_at_exit

ROOT = Path(__file__).resolve().parents[3]
PAGE = mmap.PAGESIZE
MAPS = f"""
import mmap, os, sys
from shared.file_locks import lock_mapped
fd = os.open(sys.argv[1], os.O_RDONLY)
lock_mapped(fd, {PAGE}, 2 * {PAGE})
area = mmap.mmap(fd, 2 * {PAGE}, flags=mmap.MAP_PRIVATE, offset={PAGE})
os.close(fd)
"""
READY = "print('mapped', flush=True)\nsys.stdin.readline()\n"
FORKS = "if os.fork():\n    os._exit(0)\n"
UNMAPS = READY + "area.close()\n" + READY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    return path


@pytest.fixture
def locked(path: Path) -> Iterator[Callable[[int, int], bool]]:
    """Return what this process sees of a number of pages."""
    fd = os.open(path, os.O_RDWR)
    yield lambda first, count: is_locked(fd, first * PAGE, count * PAGE)
    os.close(fd)


def run(path: Path, code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", MAPS + code, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def read_mapped(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"


def test_pages_are_locked_while_they_are_mapped_and_the_descriptor_is_closed(
    path: Path, locked: Callable[[int, int], bool]
) -> None:
    with killed_at_exit(run(path, UNMAPS)) as process:
        read_mapped(process)
        assert [locked(page, 1) for page in range(5)] == [False, True, True, False, False]
        assert locked(0, 8)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        read_mapped(process)
        assert not locked(0, 8), "it unmapped and lives"


def test_lock_ends_with_a_killed_process(path: Path, locked: Callable[[int, int], bool]) -> None:
    with killed_at_exit(run(path, READY)) as process:
        read_mapped(process)
        process.kill()
        process.wait()
        assert not locked(0, 8)


def test_lock_stays_with_a_forked_process_that_maps_on(path: Path, locked: Callable[[int, int], bool]) -> None:
    with killed_at_exit(run(path, FORKS + READY)) as process:
        read_mapped(process)
        assert process.wait() == 0, "the parent has ended"
        assert locked(1, 2)
        assert process.stdin is not None
        process.stdin.close()
        until(lambda: not locked(0, 8), what="the child has ended")


def test_pages_are_unlocked_one_by_one(path: Path, locked: Callable[[int, int], bool]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        lock_mapped(fd, 0, 4 * PAGE)
        unlock_mapped(fd, PAGE, PAGE)
        assert [locked(page, 1) for page in range(5)] == [True, False, True, True, False]
    finally:
        os.close(fd)
    assert not locked(0, 8)
