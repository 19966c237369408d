"""Bound the services' log files.

The processes append to them, and `thaw logs` reads them.
"""

from __future__ import annotations

from pathlib import Path

from shared import logfiles
from thaw.launcher.home import Home

LIMIT_BYTES = 32 * 1024 * 1024


def bound_logs(home: Home) -> None:
    """Move aside what is over the limit (one older file is kept).

    The logs of engines are bounded by their nodeagent.
    """
    logfiles.bound_logs(home.logs, LIMIT_BYTES)


def tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines; empty for a file that is not there."""
    data, _ = _read_end(path, lines)
    return data.decode(errors="replace").splitlines()[-lines:]


def tail_with_end(path: Path, lines: int) -> tuple[list[str], int]:
    """Return the last `lines` lines that have ended, and the position at which a reader continues.

    The position, in bytes, is where a line begins that has not ended yet.
    """
    data, end = _read_end(path, lines)
    ended, newline, rest = data.rpartition(b"\n")
    return (ended + newline).decode(errors="replace").splitlines()[-lines:], end - len(rest)


def _read_end(path: Path, lines: int) -> tuple[bytes, int]:
    """Return the end of a file with at least `lines` usual lines, and the file's size."""
    try:
        with path.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - max(4096, lines * 1024)))
            return f.read(), f.tell()
    except OSError:
        return b"", 0
