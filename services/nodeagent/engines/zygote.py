"""Launches builtin engines by fork from a zygote.

The zygote has imported the libraries once.

The zygote is detached and outlives this agent; the next agent finds it by its socket. If it dies a
new one is started; its engines keep running, and their exits are seen through their pidfds, without
an exit status. A zygote that does not answer is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from pydantic import ValidationError

from services.nodeagent.engines.process import find_log_writer, process_start
from shared.contracts.engine import ZYGOTE_LINE, EngineExited, EngineForked, EngineStart, ZygoteFailure, ZygoteReady
from shared.contracts.executor import ExecutorStart
from shared.contracts.models import ModelCard
from shared.contracts.phases import NEW_ZYGOTE
from shared.enginelog import log_tail
from shared.environment import without_credentials
from shared.errors import EngineFailed, from_body
from shared.tasks import run_within
from shared.unix_sockets import lock_path

log = logging.getLogger(__name__)
MAX_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path in bytes."""
_CONNECT_POLL_S = 0.02
_WARM_WITHIN_S = 60.0
"""A nodeagent counts as ready after this long, whether its zygote has imported its libraries or
not.
"""
_START_WITHIN_S = 120.0
"""A zygote listens, imports its libraries, and then sends its first message."""
_FORK_WITHIN_S = 60.0
_ENDS_WITHIN_S = 2.0
_RESTART_WAITS_S = (0.1, 0.5, 2.0, 5.0)
_REPORTS_EXITS_WITHIN_S = 10.0
"""A living zygote may not run for seconds on a busy machine."""
_LINE_LIMIT = 4 * 1024 * 1024
_KEPT_STATUSES = 256


class ZygoteLauncher:
    """Connects to the node's zygote, or starts one."""

    def __init__(self, socket_path: Path, log_path: Path, environment: dict[str, str], module: str) -> None:
        self._path = socket_path
        self._log_path = log_path
        self._environment = environment
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        """Zygotes that this agent has started, and whose exit it has not collected."""
        self._pid: int | None = None
        self._began_at: int | None = None
        """Start time of the process `_pid`. A later process may have the pid of an ended zygote."""
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._closing = asyncio.Event()
        self._failures = 0
        self._has_replied = False
        self._failed = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._warm = asyncio.Event()
        self._forking: dict[str, asyncio.Future[int]] = {}
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._forked: set[int] = set()
        """Processes that the present zygote forked for this agent and has not reported as ended."""

    def name_for(self, start: EngineStart) -> str:
        return "zygote" if self._connected.is_set() and self._has_replied else NEW_ZYGOTE

    async def run(self) -> None:
        """Keep a connection to a zygote: one that serves the socket already, or a new one."""
        while not self._closing.is_set():
            try:
                reader = await self._connect()
            except EngineFailed as e:
                self._failures += 1
                log.error("the zygote does not start", extra={"error": e.message, "attempt": self._failures})
                if self._failures >= 2:
                    self._failed.set()
                    self._warm.set()
                    self._state_changed.set()
            else:
                self._failed.clear()
                self._has_replied = False
                self._connected.set()
                self._state_changed.set()
                if self._process is None:  # it served an earlier nodeagent
                    self._warm.set()
                await self._read(reader)
                self._connected.clear()
                if self._closing.is_set():
                    return
                # It listens before its imports, so a zygote that dies without a reply may do so
                # repeatedly.
                self._failures = 0 if self._has_replied else self._failures + 1
                log.warning("lost the zygote; starting another", extra={"pid": self._pid, "log": log_tail(self._log_path)})
                self._abandon()
            await asyncio.sleep(_RESTART_WAITS_S[min(self._failures, len(_RESTART_WAITS_S) - 1)])

    async def until_warm(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WARM_WITHIN_S):
                await self._warm.wait()

    async def launch(self, start: EngineStart | ExecutorStart) -> int:
        """Fork an engine or executor.

        If the zygote dies meanwhile, or is killed because it does not answer, the next one gets a
        second attempt.
        """
        for last in (False, True):
            await self._wait_connected()
            try:
                return await self._fork(start)
            except ConnectionError as e:
                # It may have forked without a reply: then the engine holds its log open.
                found = await asyncio.to_thread(find_log_writer, Path(start.log_path))
                if found is not None:
                    return found
                if last:
                    raise EngineFailed(f"The zygote did not fork an engine: {e}") from e
        raise AssertionError("the second attempt returns or raises")

    async def _fork(self, start: EngineStart | ExecutorStart) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forking[start.instance_id] = future
        within_s = _FORK_WITHIN_S if self._has_replied else _START_WITHIN_S
        pid = self._pid
        try:
            return await run_within(within_s, self._request_fork(start, future))
        except ConnectionError:
            self._connected.clear()  # the reader notices a moment later
            raise
        except TimeoutError as e:
            await self._kill_hung(pid, within_s)
            raise ConnectionResetError(f"no answer in {within_s:g} s") from e
        finally:
            self._forking.pop(start.instance_id, None)

    async def _request_fork(self, start: EngineStart | ExecutorStart, answer: asyncio.Future[int]) -> int:
        assert self._writer is not None
        self._writer.write(start.model_dump_json().encode() + b"\n")
        await self._writer.drain()
        return await answer

    async def _kill_hung(self, pid: int | None, silent_s: float) -> None:
        """Kill a zygote that does not answer, so that `run` starts another.

        The socket and its lock are removed: `run` would connect again to a zygote that does not
        even end, or the next one would find the socket served.
        """
        if pid is None or pid != self._pid:
            return  # another one runs meanwhile
        writer = self._writer
        assert writer is not None
        log.error("the zygote does not answer; starting another", extra={"pid": pid, "silent_s": silent_s})
        self._connected.clear()
        self._remove_socket()
        await _end_process(pid, signal.SIGKILL)
        writer.close()

    async def exit_status(self, pid: int, within_s: float) -> int | None:
        """Return the exit status that the zygote reports, or None without a report in time.

        The report of a connected zygote that is the parent of the process is awaited for longer.
        """
        status, clock = self._status(pid), asyncio.get_running_loop().time
        began = clock()
        while not status.done():
            waited_s = clock() - began
            if waited_s >= (max(within_s, _REPORTS_EXITS_WITHIN_S) if self._will_report(pid) else within_s):
                return None
            await asyncio.wait((status,), timeout=within_s)
        return status.result()

    def _will_report(self, pid: int) -> bool:
        """True if the connected zygote is the parent of this process, which has ended."""
        return self._connected.is_set() and (pid in self._forked or _zombie_parent(pid) == self._pid)

    async def clean_up(self, instance_id: str, card: ModelCard) -> None:
        """No-op: builtin engines consist only of processes."""

    async def close(self) -> None:
        """Send SIGTERM to the zygote, and SIGKILL if it does not end."""
        self._closing.set()
        if self._writer is not None:
            self._writer.close()
        if self._pid is None:
            return
        if process_start(self._pid) == self._began_at:
            await _end_process(self._pid, signal.SIGTERM, signal.SIGKILL)
        self._reap()
        self._remove_socket()

    async def _wait_connected(self) -> None:
        """Wait for a connection.

        Raises:
            EngineFailed: The zygote failed to start twice in a row; the message has the end of its
                log.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_WITHIN_S):
                while not (self._connected.is_set() or self._failed.is_set()):
                    self._state_changed.clear()
                    await self._state_changed.wait()
        if not self._connected.is_set():
            raise EngineFailed(f"The zygote does not start; the end of {self._log_path.name}:\n{log_tail(self._log_path)}")

    async def _connect(self) -> asyncio.StreamReader:
        deadline = asyncio.get_running_loop().time() + _START_WITHIN_S
        self._reap()  # the connection ends before the process
        self._process = None
        while True:
            with contextlib.suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(str(self._path), limit=_LINE_LIMIT)
                self._remember(_peer(self._writer))
                log.info("zygote", extra={"pid": self._pid, "adopted": self._process is None})
                return reader
            if self._process is None:
                self._process = self._spawn()
                self._started.append(self._process)
                self._remember(self._process.pid)
            elif (status := self._process.poll()) is not None:
                raise EngineFailed(f"The zygote ended with status {status}: {log_tail(self._log_path)}")
            if asyncio.get_running_loop().time() > deadline:
                self._remove_socket()
                await _end_process(self._process.pid, signal.SIGKILL)
                raise EngineFailed(f"The zygote does not listen on {self._path} after {_START_WITHIN_S:g} s")
            await asyncio.sleep(_CONNECT_POLL_S)

    def _remember(self, pid: int) -> None:
        self._pid, self._began_at = pid, process_start(pid)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._path.unlink(missing_ok=True)
        try:
            with self._log_path.open("ab") as output:
                return subprocess.Popen(
                    [sys.executable, "-m", self._module, str(self._path)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**without_credentials(os.environ), **self._environment},
                    start_new_session=True,
                )
        except OSError as e:
            raise EngineFailed(f"The zygote could not be started: {e}") from e

    def _remove_socket(self) -> None:
        """Remove the socket and its lock, which a process keeps that SIGKILL does not end."""
        for path in (self._path, lock_path(self._path)):
            path.unlink(missing_ok=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Handle messages until the connection ends. Kill a zygote that sends no first one."""
        with contextlib.suppress(ConnectionError):
            try:
                line = await run_within(_START_WITHIN_S, reader.readline())
            except TimeoutError:
                await self._kill_hung(self._pid, _START_WITHIN_S)
                return
            while line:
                try:
                    self._on_message(ZYGOTE_LINE.validate_json(line))
                except ValidationError as e:
                    log.error("the zygote sent an invalid message", extra={"error": str(e)})
                line = await reader.readline()

    def _on_message(self, message: ZygoteReady | EngineForked | EngineExited | ZygoteFailure) -> None:
        self._has_replied = True
        match message:
            case ZygoteReady():
                self._warm.set()
            case EngineForked():
                self._settle(message.instance_id, message.pid)
            case ZygoteFailure():
                # An older zygote, which outlives its nodeagents, leaves the name of a start empty
                # that it cannot decode.
                only = next(iter(self._forking.values())) if not message.instance_id and len(self._forking) == 1 else None
                future = self._forking.get(message.instance_id, only)
                if future is not None and not future.done():
                    future.set_exception(from_body(message.error))
            case EngineExited():
                self._forked.discard(message.pid)
                status = self._status(message.pid)
                if not status.done():
                    status.set_result(message.returncode)

    def _settle(self, instance_id: str, pid: int) -> None:
        self._statuses.pop(pid, None)  # an earlier process with this pid
        self._forked.add(pid)
        future = self._forking.get(instance_id)
        if future is not None and not future.done():
            future.set_result(pid)

    def _status(self, pid: int) -> asyncio.Future[int]:
        if pid not in self._statuses:
            while len(self._statuses) >= _KEPT_STATUSES:
                self._statuses.pop(next(iter(self._statuses)))
            self._statuses[pid] = asyncio.get_running_loop().create_future()
        return self._statuses[pid]

    def _abandon(self) -> None:
        self._forked.clear()
        for future in self._forking.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the zygote died"))
        if self._writer is not None:
            self._writer.close()
        self._reap()

    def _reap(self) -> None:
        """Collect the exit of zygotes that have ended."""
        self._started = [process for process in self._started if process.poll() is None]


def _peer(writer: asyncio.StreamWriter) -> int:
    connection = writer.get_extra_info("socket")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(pid)


def _zombie_parent(pid: int) -> int | None:
    """Return the parent of an ended process that was not waited for; None for any other."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return int(parent) if state == "Z" else None


async def _end_process(pid: int, *signals: signal.Signals) -> None:
    """Send each signal, and wait a bounded time for the end of the process, until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            for signum in signals:
                signal.pidfd_send_signal(descriptor, signum)
                if await _wait_for_end(descriptor, _ENDS_WITHIN_S):
                    return
        finally:
            os.close(descriptor)


async def _wait_for_end(pidfd: int, within_s: float) -> bool:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
    return True
