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
    return tail_with_end(path, lines)[0]


def tail_with_end(path: Path, lines: int) -> tuple[list[str], int]:
    """Return the last `lines` lines, and the position in bytes at which a reader continues.

    If the last line has not ended yet, the position is its beginning.
    """
    try:
        with path.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - max(4096, lines * 1024)))
            data, end = f.read(), f.tell()
    except OSError:
        return [], 0
    return data.decode(errors="replace").splitlines()[-lines:], end - len(data.rpartition(b"\n")[2])
