"""The end of an engine's log: what may tell why it ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

_TAIL_BYTES = 8192
_TAIL_LINES = 8
_TAIL_CHARACTERS = 1200
_ERRORS = ("error", "critical")


def log_tail(path: Path) -> str:
    """The last lines of a log that may tell why it ended: errors, and what is no record of ours (a traceback, the words of a C library).

    Clients are told this. The rest of a log is nobody's business but the operator's.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    whole = text.splitlines()[1 if size > _TAIL_BYTES else 0 :]
    lines = [told for line in whole if (told := _told(line))][-_TAIL_LINES:]
    return "\n".join(lines)[-_TAIL_CHARACTERS:]


def _told(line: str) -> str:
    try:
        record = json.loads(line) if line.startswith("{") else None
    except ValueError:
        record = None
    if not isinstance(record, dict) or "level" not in record:
        return line.rstrip()
    if record["level"] not in _ERRORS:
        return ""
    return "\n".join(str(record[key]) for key in ("message", "error", "exception") if record.get(key))
