"""Bounds log files by size while other processes append to them, and sorts them by age."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

ASIDE = ".1"
"""Suffix of the one older file that is kept."""


def bound_log(path: Path, limit_bytes: int) -> None:
    """Rotate a log over the limit: copy it, then truncate it.

    The writer keeps the file open for appending. Lines written between the copy and the truncation
    are lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > limit_bytes:
            shutil.copyfile(path, path.with_name(path.name + ASIDE))
            with path.open("r+b") as f:
                f.truncate()


def bound_logs(directory: Path, limit_bytes: int) -> None:
    """Bound every `*.log` in a directory."""
    for path in directory.glob("*.log"):
        bound_log(path, limit_bytes)


def sort_newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort files by modification time.

    Those that do not exist are last: removed in the meantime, or links to removed files.
    """
    return sorted(paths, key=_modified_at, reverse=True)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
