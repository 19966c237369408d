"""Files of the SSD cache: revision names, sizes, and flushing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

WHOLE_BYTES = "whole-bytes"
"""File in the directory of a partial model: its final size in bytes."""
_REVISION = re.compile(r"[0-9a-f]{8,64}")


def check_revision(revision: str) -> str:
    if not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is no revision")
    return revision


def model_directories(parent: Path) -> Sequence[Path]:
    try:
        return sorted(p for p in parent.iterdir() if _REVISION.fullmatch(p.name) and p.is_dir())
    except OSError:
        return ()


def sum_allocated(directory: Path) -> int:
    """Return the bytes of disk that its files take; they may be sparse."""
    return sum(p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file())


def read_promised(directory: Path) -> int:
    """Return the final size of a partial model; 0 if it is not recorded."""
    try:
        return int((directory / WHOLE_BYTES).read_text())
    except (OSError, ValueError):
        return 0


def size_of(path: Path) -> int:
    """Return the size in bytes, -1 without the file."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
