"""Explains exits from the status, the OOM counter and the log."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from shared.contracts.base import ErrorBody
from shared.enginelog import log_tail
from shared.errors import EngineFailed, EngineKilled
from shared.logfiles import ASIDE, bound_logs, sort_newest_first

log = logging.getLogger(__name__)
_LOOK_S = 2.0
_FAULT = b"Fatal Python error: "
_FAULT_BYTES = 1 << 18


def explain_exit(pid: int, returncode: int | None, oom_kills: tuple[int | None, int | None], log_path: Path) -> ErrorBody:
    """Describe an exit.

    Args:
        pid: The process.
        returncode: Exit status, -N for signal N, or None if unknown.
        oom_kills: The kernel's count of OOM kills shortly before and after. A rise is reported as
            an observation about the machine.
        log_path: The instance's log.
    """
    how = _describe_exit(returncode)
    before, after = oom_kills
    unseen = returncode in (None, -signal.SIGKILL)
    out_of_memory = unseen and before is not None and after is not None and after > before
    if out_of_memory and before is not None and after is not None:
        how += (
            f"; possibly out of memory: the kernel's out-of-memory killer struck {after - before} time(s) on this machine just then"
        )
    tail = log_tail(log_path)
    instance = log_path.name.removesuffix(".engine.log")
    reason = f"; the end of its log:\n{tail}" if tail else f"; its log has no reason (`thaw logs {instance}`)"
    kind = EngineKilled if unseen and not out_of_memory else EngineFailed
    return kind(f"The engine (pid {pid}) {how}{reason}").body()


def _describe_exit(returncode: int | None) -> str:
    if returncode is None:
        return "ended with an unknown exit status"
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    except ValueError:
        return f"was killed by signal {-returncode}"


def reports_fault(log_path: Path) -> bool:
    """True if the process wrote about a fatal signal of its own (faulthandler) at the log's end.

    This includes SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT. The stacks of all threads follow.
    """
    try:
        with log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _FAULT_BYTES))
            return any(line.startswith(_FAULT) for line in file)
    except OSError:
        return False


def prune_logs(directory: Path, keep: int, spared: frozenset[str]) -> None:
    """Remove the oldest engine logs beyond `keep`.

    Logs of the instances in `spared` stay. The log of an instance in an executor is a link to the
    executor's, which may have been removed.
    """
    logs = [p for p in directory.glob("*.engine.log") if p.name.removesuffix(".engine.log") not in spared]
    for path in sort_newest_first(logs)[keep:]:
        try:
            path.unlink(missing_ok=True)
            path.with_name(path.name + ASIDE).unlink(missing_ok=True)
        except OSError as e:
            log.warning("failed to remove an engine's log", extra={"path": str(path), "error": str(e)})


async def keep_logs_bounded(directory: Path, limit_bytes: int) -> None:
    """Bound the logs of engines, zygote and spares until cancelled.

    Between two checks they may exceed the limit.
    """
    while True:
        await asyncio.to_thread(bound_logs, directory, limit_bytes)
        await asyncio.sleep(_LOOK_S)
