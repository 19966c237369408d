"""An engine as a child process: its own session and control group, tied to its host's life, its words in the instance's log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from services.enginehost.drivers.port import Command
from services.enginehost.http1 import Address
from services.enginehost.runtimes import reaper, spawn
from services.enginehost.runtimes.endpoint import ON_LOOPBACK, Reach
from services.enginehost.runtimes.port import Activity, Ended
from services.enginehost.runtimes.spare import Spare
from shared.environment import without_credentials
from shared.errors import EngineFailed
from shared.processes import MARK_VARIABLE, descendants, end_all, marked

_SPAWN = Path(spawn.__file__)
_REAPER = Path(reaper.__file__)
_REAPER_WITHIN_S = 30.0
_LEFTOVERS_WITHIN_S = 2.0


def free_port(host: str) -> int:
    """A port that nobody listens on just now. Whoever takes it before the engine does is noticed later (`owns_port`)."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def clean_environment(mark: str, added: Mapping[str, str]) -> dict[str, str]:
    """What an engine inherits: everything but credentials and Thaw's own settings. `added` goes over it."""
    kept = {k: v for k, v in without_credentials(os.environ).items() if not k.startswith(("THAW_", "OTEL_"))}
    return {**kept, MARK_VARIABLE: mark, **added}


class EngineProcess:
    """`start` it once. Its standard output and error are the host's own, which are the instance's log."""

    container = None

    def __init__(
        self, child: subprocess.Popen[bytes], mark: str, address: Address, log_path: Path, groups: tuple[Path, ...], held: int
    ) -> None:
        """`groups`: files with the pids in its control groups. `held`: the end of the reaper's pipe; with it goes the engine."""
        self._child = child
        self._held = held
        self._mark = mark
        self._groups = groups
        self._log_path = log_path
        self._oom_before = oom_kills()
        self.address = address
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @classmethod
    def start(
        cls,
        command: Command,
        mark: str,
        address: Address,
        log_path: Path,
        cgroup_procs: str | None,
        niceness: int = 0,
        spare: Spare | None = None,
        reach: Reach = ON_LOOPBACK,
    ) -> EngineProcess:
        """`spare`: becomes the engine if it can. `address`: where it listens if `reach` has no socket. Raises `EngineFailed`. The program itself
        is looked for by the child: a missing one ends with status 127 and a line in the log."""
        token = secrets.token_hex(8)
        env = {**clean_environment(mark, command.env), reaper.VARIABLE: token}
        try:
            held = _tie(token, cgroup_procs or "")
            child = spare.become(command, env, cgroup_procs, niceness, log_path) if spare is not None else None
            child = child or _spawned(command, env, cgroup_procs, niceness, _network(reach, address.port))
            told = f"{child.pid} {reaper.started(child.pid)}\n"
            if reach.directory is not None:
                told += f"{reaper.DIRECTORY} {reach.directory}\n"
            os.write(held, told.encode())
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise EngineFailed(f"{command.argv[0]} cannot be started: {e}") from e
        groups = tuple(map(Path, filter(None, (cgroup_procs or "").split(":"))))
        where = Address(path=str(reach.socket)) if reach.socket is not None else address
        return cls(child, mark, where, log_path, groups, held)

    def pids(self) -> tuple[int, ...]:
        if self._ended.done():
            return ()
        return tuple(sorted({*descendants(self._child.pid), *(self._members() or marked(self._mark))}))

    def _members(self) -> set[int]:
        """Who is in its control groups; nobody where it has none."""
        found: set[int] = set()
        for group in self._groups:
            with contextlib.suppress(OSError):
                found.update(map(int, group.read_text().split()))
        return found

    def activity(self) -> Activity:
        cpu, read = 0.0, 0
        for pid in descendants(self._child.pid):
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                times = process.cpu_times()
                cpu += times.user + times.system
                read += process.io_counters().read_chars
        return Activity(cpu, read, _size(self._log_path))

    def owns_port(self) -> bool | None:
        if self.address.path:
            return True  # nobody else may enter its directory, nor its network
        try:
            for pid in descendants(self._child.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = psutil.Process(pid).net_connections("tcp")
                    if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.address.port for c in found):
                        return True
        except psutil.AccessDenied:
            return None
        return False

    def note_shared(self) -> None:
        pids = self.pids() or marked(self._mark) | _same_session(self._child.pid)
        found = {path: inode for pid in pids for path, inode in reaper.shared(pid).items()}
        with contextlib.suppress(OSError):  # the reaper is gone: nobody removes it
            os.write(self._held, "".join(f"{inode} {path}\n" for path, inode in found.items()).encode())

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def stop(self, signal_name: str, grace_s: float) -> Ended:
        pids = self.pids()
        await asyncio.to_thread(self.note_shared)
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.Signals[signal_name])
            try:
                async with asyncio.timeout(grace_s):
                    await self.wait()
            except TimeoutError:
                self._child.kill()
                await self.wait()
        # Those that outlive it: workers that ignored the signal, or have left the session.
        known = set(pids)
        await asyncio.to_thread(end_all, lambda: marked(self._mark) | (known & _same_session(self._child.pid)), _LEFTOVERS_WITHIN_S)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        return await self.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        returncode = self._child.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        after = oom_kills()
        struck = returncode == -signal.SIGKILL and None not in (after, self._oom_before) and after != self._oom_before
        self._ended.set_result(Ended(returncode, struck if returncode == -signal.SIGKILL else False))


def _network(reach: Reach, port: int) -> str:
    """As spawn.py takes it."""
    if not reach.has_own_network:
        return ""
    return "own" if reach.is_engines else f"{port}:{reach.socket}"


def _spawned(
    command: Command, env: Mapping[str, str], cgroup_procs: str | None, niceness: int, network: str
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", str(_SPAWN), str(os.getpid()), cgroup_procs or "", str(niceness), network, "--", *command.argv]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=env, start_new_session=True)


def _tie(token: str, cgroup_procs: str) -> int:
    """A process that ends the engine's, all of them, when this one has ended without doing so; the descriptor that holds it off."""
    reading, held = os.pipe()
    try:
        argv = [sys.executable, "-I", str(_REAPER), f"{reaper.VARIABLE}={token}", cgroup_procs]
        subprocess.run(argv, stdin=reading, start_new_session=True, check=True, timeout=_REAPER_WITHIN_S)
    except BaseException:
        os.close(held)
        raise
    finally:
        os.close(reading)
    return held


def _same_session(leader: int) -> set[int]:
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                found.add(pid)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def oom_kills() -> int | None:
    """How often the kernel's out-of-memory killer has struck on this machine since boot."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
