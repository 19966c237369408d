"""The end of an engine's log: lines that may explain why it exited."""

from __future__ import annotations

import json
import os
from pathlib import Path

_TAIL_BYTES = 8192
_TAIL_LINES = 8
_TAIL_CHARACTERS = 1200
_ERRORS = ("error", "critical")


def log_size(path: Path) -> int:
    """Return the size of a log in bytes: where the output of its next process begins."""
    return path.stat().st_size if path.exists() else 0


def log_tail(path: Path, from_byte: int = 0) -> str:
    """Return the last log lines that may explain an exit.

    These are errors, and lines without a record's format (a traceback, a C library's message).
    Clients receive this text, so it has no other lines of the log.

    Args:
        path: The log.
        from_byte: Where the output of the process begins, in a log that has earlier output.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            from_byte = from_byte if from_byte <= size else 0  # the log has been rotated since
            begin = max(from_byte, size - _TAIL_BYTES)
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    whole = text.splitlines()[1 if begin > from_byte else 0 :]
    lines = [found for line in whole if (found := _error_text(line))][-_TAIL_LINES:]
    return "\n".join(lines)[-_TAIL_CHARACTERS:]


def _error_text(line: str) -> str:
    try:
        record = json.loads(line) if line.startswith("{") else None
    except ValueError:
        record = None
    if not isinstance(record, dict) or "level" not in record:
        return line.rstrip()
    if record["level"] not in _ERRORS:
        return ""
    return "\n".join(str(record[key]) for key in ("message", "error", "exception") if record.get(key))
