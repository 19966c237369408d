"""What lies in the SSD cache's directories: names of revisions, sizes, and having written bytes on the disk."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

WHOLE_BYTES = "whole-bytes"
"""In the directory of a partial model: how many bytes it will have."""
_REVISION = re.compile(r"[0-9a-f]{8,64}")


def checked(revision: str) -> str:
    if not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is no revision")
    return revision


def model_directories(parent: Path) -> Sequence[Path]:
    try:
        return sorted(p for p in parent.iterdir() if _REVISION.fullmatch(p.name) and p.is_dir())
    except OSError:
        return ()


def allocated(directory: Path) -> int:
    """Bytes of the disk that its files take; they may be sparse."""
    return sum(p.stat().st_blocks * 512 for p in directory.rglob("*") if p.is_file())


def promised(directory: Path) -> int:
    """What a partial model will have in the end; 0 if nobody has said so."""
    try:
        return int((directory / WHOLE_BYTES).read_text())
    except (OSError, ValueError):
        return 0


def size_of(path: Path) -> int:
    """-1 if it is not there."""
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
