"""Files of the SSD cache: revision names, sizes, and flushing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

WHOLE_BYTES = "whole-bytes"
"""Name of the file in a partial model's directory that has the model's final size in bytes."""
_REVISION = re.compile(r"[0-9a-f]{8,64}")


def check_revision(revision: str) -> str:
    """Return `revision`, which becomes part of a path. Raises `ValueError` if it is malformed."""
    if not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is no revision")
    return revision


def model_directories(parent: Path) -> Sequence[Path]:
    """Return the directories of models below `parent`; none if it cannot be read."""
    try:
        return sorted(p for p in parent.iterdir() if _REVISION.fullmatch(p.name) and p.is_dir())
    except OSError:
        return ()


def sum_allocated(directory: Path) -> int:
    """Return the bytes of disk that a directory's files occupy; they may be sparse."""
    return sum(p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file())


def read_promised(directory: Path) -> int:
    """Return the final size of a partial model; 0 if it is not recorded."""
    try:
        return int((directory / WHOLE_BYTES).read_text())
    except (OSError, ValueError):
        return 0


def size_of(path: Path) -> int:
    """Return a file's size in bytes; -1 if there is no file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def flush(path: Path) -> None:
    """Write a file or a directory to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
