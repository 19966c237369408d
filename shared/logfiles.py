"""Bounds log files by size while other processes append to them, sorts and reads them."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

ASIDE = ".1"
"""Suffix of the one older file that is kept."""
_CONTROL = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""ANSI sequences and control characters, which a service's libraries write and a terminal would
obey.
"""


def strip_control(text: str) -> str:
    """Remove ANSI sequences and control characters except tabs and newlines."""
    return _CONTROL.sub("", text)


@dataclass(frozen=True)
class LogPart:
    """A part of a log file.

    Attributes:
        lines: Complete lines.
        rest: The beginning of a line that has not ended yet.
        position: Of `rest` in the file, in bytes.
        skipped: Lines before these were left out, or the file was rotated.
    """

    lines: tuple[str, ...]
    rest: str
    position: int
    skipped: bool


def read_part(path: Path, lines: int, limit_bytes: int, after: int | None = None) -> LogPart:
    """Read the last lines of a log, or the last of those after a position.

    Args:
        path: The file.
        lines: Most lines.
        limit_bytes: Most bytes to read.
        after: The position of an earlier part; None: the whole file counts.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        continued = after is not None and _is_line_start(file, after, size)
        start = after if after is not None and continued else 0
        begin = max(start, size - limit_bytes)
        file.seek(begin)
        data = file.read(size - begin)
    complete, ended, rest = data.rpartition(b"\n")
    found = complete.split(b"\n") if ended else []
    if found and begin > start:
        found = found[1:]  # the line at `begin` has no beginning
    decoded = tuple(strip_control(line.decode(errors="replace")) for line in found[-lines:])
    skipped = begin > start or len(found) > lines or (after is not None and not continued)
    return LogPart(decoded, strip_control(rest.decode(errors="replace")), begin + len(data) - len(rest), skipped)


def _is_line_start(file: BinaryIO, position: int, size: int) -> bool:
    """True if a line begins there; else the file was rotated since."""
    if not 0 < position <= size:
        return position == 0
    file.seek(position - 1)
    return file.read(1) == b"\n"


def bound_log(path: Path, limit_bytes: int) -> None:
    """Rotate a log over the limit: copy it, then truncate it.

    The writer keeps the file open for appending. Lines written between the copy and the truncation
    are lost, and all lines if they cannot be copied: a log that grows on a full disk would keep it
    full.
    """
    aside = path.with_name(path.name + ASIDE)
    with contextlib.suppress(OSError):
        if path.stat().st_size <= limit_bytes:
            return
        try:
            shutil.copyfile(path, aside)
        except OSError:
            aside.unlink(missing_ok=True)
        with path.open("r+b") as f:
            f.truncate()


def bound_logs(directory: Path, limit_bytes: int) -> None:
    """Bound every `*.log` in a directory.

    A link to another one, as those of the instances in an executor, is left alone.
    """
    whole = directory.resolve()
    for path in directory.glob("*.log"):
        if not path.is_symlink() or path.resolve().parent != whole:
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
