"""What there is to say about an engine that has died: only what can be read."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from shared.contracts.base import ErrorBody
from shared.errors import EngineFailed

_TAIL_BYTES = 8192
_TAIL_LINES = 8
_TAIL_CHARACTERS = 1200
_ERRORS = ("error", "critical")


def explain_exit(pid: int, returncode: int | None, oom_kills: tuple[int | None, int | None], log_path: Path) -> ErrorBody:
    """`oom_kills`: the kernel's counter a little before and after. A rise is told as what it is: somewhere on the machine, at that time."""
    how = _how(returncode)
    before, after = oom_kills
    if returncode in (None, -signal.SIGKILL) and before is not None and after is not None and after > before:
        how += (
            f"; possibly out of memory: the kernel's out-of-memory killer struck {after - before} time(s) on this machine just then"
        )
    tail = log_tail(log_path)
    instance = log_path.name.removesuffix(".engine.log")
    told = f"; the end of its log:\n{tail}" if tail else f"; its log tells no reason (`thaw logs {instance}`)"
    return EngineFailed(f"the engine (pid {pid}) {how}{told}").body()


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "ended (its exit status is not known)"
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"was killed by signal {-returncode}"


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


def prune_logs(directory: Path, keep: int, spared: frozenset[str]) -> None:
    """Remove the oldest engine logs beyond `keep`; those of the instances in `spared` stay."""
    logs = [p for p in directory.glob("*.engine.log") if p.name.removesuffix(".engine.log") not in spared]
    for path in sorted(logs, key=lambda p: p.stat().st_mtime, reverse=True)[keep:]:
        path.unlink(missing_ok=True)
