"""Remove the lock files of a killed PostgreSQL server.

PostgreSQL writes its pid to `postmaster.pid` and to `.s.PGSQL.<port>.lock`, and refuses to start
while a process with that pid exists. The pid of a killed server may still exist: as a zombie under
an init that reaps no orphans, or as another process that got the same pid.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from thaw.launcher.identity import Identity, identify
from thaw.launcher.servers import Postgres

log = logging.getLogger(__name__)
_SERVERS = ("postgres", "postmaster")
_LEAVE_WITHIN_S = 1.0
"""Time in which the processes of a killed server notice its end and exit."""
_BOUND_S = 5.0
_POLL_S = 0.02
_KEY_BITS = 0xFFFF_FFFF
"""PostgreSQL writes a key as unsigned, the kernel as signed."""


@dataclass(frozen=True)
class LockFile:
    """A lock file of PostgreSQL.

    Attributes:
        pid: The server's process; a single-user server writes it with a minus sign.
        data: The server's data directory.
        segment: Key and id of its System V shared memory; only `postmaster.pid` names it.
    """

    path: Path
    pid: int
    data: Path
    segment: tuple[int, int] | None = None

    @classmethod
    def read(cls, path: Path) -> LockFile | None:
        """Return the lock file at `path`; None without one, or if it is incomplete."""
        try:
            lines = path.read_text().splitlines()
            pid, data = abs(int(lines[0])), Path(lines[1])
        except (OSError, ValueError, IndexError):
            return None
        numbers = lines[6].split() if len(lines) > 6 else []
        return cls(path, pid, data, (int(numbers[0]) & _KEY_BITS, int(numbers[1])) if len(numbers) == 2 else None)


def remove_stale_locks(postgres: Postgres) -> None:
    """Remove the lock files of a server that was killed.

    The function waits until the processes of that server have left its shared memory, and kills
    those that do not leave. It keeps the lock files of a living server, and those of a server whose
    shared memory stays in use: PostgreSQL then refuses to start, and says why.
    """
    if not sys.platform.startswith("linux"):  # other systems have no /proc, and an init that reaps orphans
        return
    lock = LockFile.read(postgres.data / "postmaster.pid")
    found = [lock, *(LockFile.read(path) for path in sorted(postgres.sockets.glob(".s.PGSQL.*.lock")))]
    locks = [known for known in found if known is not None and known.data == postgres.data]
    if not locks or any(_is_server(known.pid, postgres.data) for known in locks):
        return
    if lock is not None and lock.segment is not None and not _await_unused(lock.segment, postgres.data):
        log.warning("processes of a killed PostgreSQL still use its shared memory; keeping %s", lock.path)
        return
    for known in reversed(locks):  # `postmaster.pid` last: an interrupted removal is repeated
        known.path.unlink(missing_ok=True)
        log.info("removed %s of the killed PostgreSQL %d", known.path, known.pid)


def _is_server(pid: int, data: Path) -> bool:
    """True if `pid` is a living server of `data`; also True if that cannot be found out."""
    identity = identify(pid)
    if identity is None or not identity.is_alive():
        return False
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() not in _SERVERS:
            return False
        return Path(f"/proc/{pid}/cwd").samefile(data)  # a server works in its data directory
    except OSError:
        return identity.is_alive()


def _await_unused(segment: tuple[int, int], data: Path) -> bool:
    """Wait until no process uses the shared memory; return False if one does after the bound."""
    begun = time.monotonic()
    while _is_used(segment):
        waited = time.monotonic() - begun
        if waited > _BOUND_S:
            return False
        if waited > _LEAVE_WITHIN_S:
            for process in _processes_of(data):
                process.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    return True


def _is_used(segment: tuple[int, int]) -> bool:
    """True if a process has the shared memory attached; also True if that cannot be found out."""
    try:
        rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    except OSError:
        return True
    columns = {name: i for i, name in enumerate(rows[0])}
    key, number, attached = (columns[name] for name in ("key", "shmid", "nattch"))
    return any((int(row[key]) & _KEY_BITS, int(row[number])) == segment and int(row[attached]) > 0 for row in rows[1:])


def _processes_of(data: Path) -> list[Identity]:
    """Return the living PostgreSQL processes that work in `data`."""
    found = []
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if (directory / "comm").read_text().strip() in _SERVERS and (directory / "cwd").samefile(data):
                found.append(identify(int(directory.name)))
    return [process for process in found if process is not None]
