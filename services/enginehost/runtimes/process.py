"""An engine as a child process that ends with its host.

It has its own session and control group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from services.enginehost.drivers.port import Command
from services.enginehost.http1 import Address
from services.enginehost.runtimes import reaper, spawn
from services.enginehost.runtimes.endpoint import LOOPBACK_ENDPOINT, Endpoint
from services.enginehost.runtimes.port import Activity, EngineExit
from services.enginehost.runtimes.spare import Spare
from shared.environment import without_credentials
from shared.errors import EngineFailed
from shared.processes import MARK_VARIABLE, descendants, end_all, find_marked

_SPAWN = Path(spawn.__file__)
_REAPER = Path(reaper.__file__)
_REAPER_WITHIN_S = 30.0
_LEFTOVERS_WITHIN_S = 2.0


def clean_environment(mark: str, added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine: this process's without credentials and Thaw's settings.

    Args:
        mark: Marks all processes of the instance.
        added: Further variables.
    """
    kept = {k: v for k, v in without_credentials(os.environ).items() if not k.startswith(("THAW_", "OTEL_"))}
    return {**kept, MARK_VARIABLE: mark, **added}


class EngineProcess:
    """A started engine process.

    Its standard output and error are the host's, which are the instance's log.
    """

    container = None

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        mark: str,
        address: Address,
        log_path: Path,
        groups: tuple[Path, ...],
        reaper_pipe: int,
    ) -> None:
        """Wrap a started process.

        Args:
            child: The process.
            mark: Marks all processes of the instance, in their environment.
            address: The address on which it listens.
            log_path: The instance's log.
            groups: cgroup.procs files of its control groups.
            reaper_pipe: Write end of the reaper's pipe; when it closes, the reaper ends the engine.
        """
        self._child = child
        self._reaper_pipe = reaper_pipe
        self._mark = mark
        self._groups = groups
        self._log_path = log_path
        self._oom_before = oom_kills()
        self.address = address
        self._ended: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()
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
        endpoint: Endpoint = LOOPBACK_ENDPOINT,
    ) -> EngineProcess:
        """Start an engine.

        A missing program is found by the child, which exits with status 127 and a line in the log.

        Args:
            command: The engine's command.
            mark: Marks all processes of the instance.
            address: The address on which it listens if `endpoint` has no socket.
            log_path: The instance's log.
            cgroup_procs: cgroup.procs files to join, separated by colons.
            niceness: Added to the niceness of this process.
            spare: A spare interpreter that becomes the engine if it can.
            endpoint: The endpoint at which the host reaches the engine.

        Raises:
            EngineFailed: The process cannot be started.
        """
        token = secrets.token_hex(8)
        env = {**clean_environment(mark, command.env), reaper.VARIABLE: token}
        try:
            reaper_pipe = _start_reaper(token, cgroup_procs or "")
            child = spare.become(command, env, cgroup_procs, niceness, log_path) if spare is not None else None
            child = child or _spawn(command, env, cgroup_procs, niceness, _network(endpoint, address.port))
            message = f"{child.pid} {reaper.read_start_time(child.pid)}\n"
            if endpoint.directory is not None:
                message += f"{reaper.DIRECTORY} {endpoint.directory}\n"
            os.write(reaper_pipe, message.encode())
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise EngineFailed(f"{command.argv[0]} cannot be started: {e}") from e
        where = Address(path=str(endpoint.socket)) if endpoint.socket is not None else address
        return cls(child, mark, where, log_path, _groups(cgroup_procs), reaper_pipe)

    def pids(self) -> tuple[int, ...]:
        if self._ended.done():
            return ()
        return tuple(sorted({*descendants(self._child.pid), *(self._members() or find_marked(self._mark))}))

    def _members(self) -> set[int]:
        """Return the processes in its control groups; empty without control groups."""
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
            return True  # only this user may enter its directory and its network
        try:
            for pid in descendants(self._child.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = psutil.Process(pid).net_connections("tcp")
                    if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.address.port for c in found):
                        return True
        except psutil.AccessDenied:
            return None
        return False

    def take_over(self, log_path: Path, cgroup_procs: str | None) -> None:
        self._log_path, self._groups = log_path, _groups(cgroup_procs)

    def record_shared_memory(self) -> None:
        pids = self.pids() or find_marked(self._mark) | _same_session(self._child.pid)
        found = {path: inode for pid in pids for path, inode in reaper.find_shared_memory(pid).items()}
        with contextlib.suppress(OSError):  # the reaper is gone: the segments stay
            os.write(self._reaper_pipe, "".join(f"{inode} {path}\n" for path, inode in found.items()).encode())

    async def wait(self) -> EngineExit:
        return await asyncio.shield(self._ended)

    async def stop(self, signal_name: str, grace_s: float) -> EngineExit:
        pids = self.pids()
        await asyncio.to_thread(self.record_shared_memory)
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.Signals[signal_name])
            try:
                async with asyncio.timeout(grace_s):
                    await self.wait()
            except TimeoutError:
                self._child.kill()
                await self.wait()
        # Workers that ignored the signal, or left the session, outlive it.
        known = set(pids)
        await asyncio.to_thread(
            end_all, lambda: find_marked(self._mark) | (known & _same_session(self._child.pid)), _LEFTOVERS_WITHIN_S
        )
        if self._reaper_pipe >= 0:
            os.close(self._reaper_pipe)
            self._reaper_pipe = -1
        return await self.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        returncode = self._child.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        after = oom_kills()
        may_be_oom = None not in (after, self._oom_before) and after != self._oom_before
        self._ended.set_result(EngineExit(returncode, returncode == -signal.SIGKILL and may_be_oom))


def _groups(cgroup_procs: str | None) -> tuple[Path, ...]:
    return tuple(map(Path, filter(None, (cgroup_procs or "").split(":"))))


def _network(endpoint: Endpoint, port: int) -> str:
    """Return the NETWORK argument of spawn.py."""
    if not endpoint.has_own_network:
        return ""
    return "own" if endpoint.engine_listens else f"{port}:{endpoint.socket}"


def _spawn(
    command: Command, env: Mapping[str, str], cgroup_procs: str | None, niceness: int, network: str
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-IS", str(_SPAWN), str(os.getpid()), cgroup_procs or "", str(niceness), network, "--", *command.argv]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=env, start_new_session=True)


def _start_reaper(token: str, cgroup_procs: str) -> int:
    """Start the reaper, which ends the engine if this host dies.

    Returns:
        The write end of a pipe. When it is closed, the reaper ends the engine.
    """
    reading, reaper_pipe = os.pipe()
    try:
        argv = [sys.executable, "-IS", str(_REAPER), f"{reaper.VARIABLE}={token}", cgroup_procs]
        subprocess.run(argv, stdin=reading, start_new_session=True, check=True, timeout=_REAPER_WITHIN_S)
    except BaseException:
        os.close(reaper_pipe)
        raise
    finally:
        os.close(reading)
    return reaper_pipe


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
    """Return the number of the machine's out-of-memory kills since boot; None: it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
