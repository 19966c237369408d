"""The node's executors: one process for each device that hosts shared instances (ADR 0063).

Executors outlive this agent, as engines do. The next agent finds them by their records on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from services.nodeagent.engines.launcher import Launcher
from services.nodeagent.engines.process import process_start
from shared.contracts import subjects
from shared.contracts.base import Frozen
from shared.contracts.engine import EngineStart
from shared.contracts.executor import (
    AttachInstance,
    DetachInstance,
    ExecutorStart,
    InstanceAttached,
    InstanceDetached,
    parse_current,
)
from shared.errors import EngineFailed, Unreachable
from shared.logfiles import ASIDE, sort_newest_first
from shared.messaging.mesh import HALF_OPEN_WITHIN_S
from shared.restart_records import recover_records, write_record

log = logging.getLogger(__name__)
_ATTACH_WITHIN_S = 60.0
_ATTACH_MS = 5_000
_POLL_S = 0.01
_REACHED_AGAIN_S = 0.1
_WATCHED_EVERY_S = 1.0
_ENDS_WITHIN_S = 5.0
_LOST_AFTER_S = HALF_OPEN_WITHIN_S + 5.0
KEPT_LOGS = 8


class ExecutorRecord(Frozen):
    """An executor, as the next agent needs to know it."""

    executor_id: str
    device: str
    pid: int
    process_start: int

    @property
    def is_alive(self) -> bool:
        return process_start(self.pid) == self.process_start


class _Silence(NamedTuple):
    """A time in which an executor did not answer, in seconds of the monotonic clock."""

    since: float
    until: float


class Executors:
    """Starts executors, and attaches and detaches instances."""

    def __init__(
        self,
        launcher: Launcher,
        request: Callable[..., Awaitable[Any]],
        directory: Path,
        logs: Path,
        node: str,
        environment: dict[str, str],
        kill_grace_s: float,
    ) -> None:
        """Find the executors of an earlier agent.

        Args:
            launcher: Starts processes of the builtin engine.
            request: `Mesh.request`.
            directory: The directory of records.
            logs: Directory of logs.
            node: The node's name.
            environment: Settings for executors.
            kill_grace_s: Interval in seconds at which a failed detach is repeated.
        """
        self._launcher = launcher
        self._request = request
        self._directory = directory
        self._logs = logs
        self._node = node
        self._environment = environment
        self._kill_grace_s = kill_grace_s
        self._starting: dict[str, asyncio.Lock] = {}
        self._by_pid: dict[int, ExecutorRecord] = {}
        self._culprits: dict[int, str] = {}
        self._stuck: dict[int, str] = {}
        self._silent: set[int] = set()
        self._silences: dict[int, _Silence] = {}
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):
            recover_records(self._directory)
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(OSError, ValidationError):
                record = ExecutorRecord.model_validate_json(path.read_bytes())
                self._by_pid[record.pid] = record

    def is_running(self, device: str) -> bool:
        return self._find(device) is not None

    def list_devices(self) -> list[str]:
        """Devices whose executor runs."""
        return [r.device for r in self._by_pid.values() if r.is_alive]

    def hosts(self, pid: int) -> bool:
        """True if the process is an executor."""
        return pid in self._by_pid

    async def attach(self, start: EngineStart) -> int:
        """Attach an instance to its device's executor, and return the executor's pid.

        Start an executor if the device has none.

        Raises:
            ThawError: The instance is not attached.
        """
        async with self._starting.setdefault(start.device, asyncio.Lock()):
            record = self._find(start.device) or await self._start(start.device)
        path = Path(start.log_path)
        try:
            path.unlink(missing_ok=True)
            path.symlink_to(self._log_path(record.executor_id).name)
        except OSError as e:
            raise EngineFailed(f"The log of {start.instance_id} cannot be linked to its executor's: {e}") from e
        deadline = time.monotonic() + _ATTACH_WITHIN_S
        command = AttachInstance(start=start, deadline_ms=_ATTACH_MS)
        while True:
            try:
                await self._request(subjects.executor_control(record.executor_id), command, InstanceAttached)
                self._silences.pop(record.pid, None)
                return record.pid
            except Unreachable as e:  # it is connecting to NATS
                if not record.is_alive or time.monotonic() > deadline:
                    raise EngineFailed(f"The executor (pid {record.pid}) cannot be reached: {e.message}") from e
                await asyncio.sleep(_POLL_S)

    async def detach(self, instance_id: str, pid: int, within_s: float) -> InstanceDetached:
        """Detach an instance.

        An executor that cannot be reached may be reconnecting to NATS, and is asked again.

        Raises:
            Unreachable: The executor cannot be reached in time, has ended, or is unknown.
            DeadlineExceeded: The executor did not answer in time.
            EngineFailed: The instance's memory is still mapped.
        """
        record = self._by_pid.get(pid)
        if record is None:
            raise Unreachable(f"No executor with pid {pid} is known")
        command = DetachInstance(instance_id=instance_id, deadline_ms=max(1, int(within_s * 1e3)))
        deadline = time.monotonic() + within_s
        while True:
            try:
                detached = await self._request(subjects.executor_control(record.executor_id), command, InstanceDetached)
            except Unreachable:
                if not record.is_alive or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_REACHED_AGAIN_S)
                continue
            except EngineFailed:  # an answer
                self._silences.pop(pid, None)
                raise
            self._silences.pop(pid, None)
            assert isinstance(detached, InstanceDetached)
            return detached

    def culprit(self, pid: int) -> str:
        """Return the id of the instance that was computing when an executor died; empty: none."""
        record = self._by_pid.get(pid)
        if record is None:
            return self._culprits.get(pid, "")
        return self._read_current(record)[0]

    def is_stuck(self, pid: int) -> bool:
        """True if `watch` has ended the executor because a step did not end."""
        return pid in self._stuck

    def note_silent(self, pid: int, silent_s: float) -> bool:
        """Record that an executor did not answer for `silent_s` seconds.

        Returns:
            True if it is to be ended: a step took that long, and keeps the interpreter's lock; or
            it had time enough to notice a half-open connection to NATS.
        """
        record, now = self._by_pid.get(pid), time.monotonic()
        if record is None or not record.is_alive:
            return True
        _, began_ns = self._read_current(record)
        if began_ns and now - began_ns / 1e9 >= silent_s:
            self._silent.add(pid)
            return True
        since, until = self._silences.get(pid, (now - silent_s, now))
        is_same = now - until <= _LOST_AFTER_S + self._kill_grace_s
        silence = _Silence(since if is_same else now - silent_s, now)
        self._silences[pid] = silence
        return silence.until - silence.since >= _LOST_AFTER_S

    def is_silent(self, pid: int) -> bool:
        """True if the agent ended the executor because a step kept it from answering."""
        return pid in self._silent

    async def watch(self, limit_s: float) -> None:
        """End executors with a step of more than `limit_s` seconds, until cancelled.

        The file of an executor that hangs in a step names the instance. There is no event for it.
        """
        while True:
            for record in list(self._by_pid.values()):
                name, began_ns = self._read_current(record)
                took_s = (time.monotonic_ns() - began_ns) / 1e9
                if began_ns and took_s > limit_s and record.is_alive and record.pid not in self._stuck:
                    log.error(
                        "a step does not end; ending its executor",
                        extra={"instance": name, "pid": record.pid, "device": record.device, "step_s": round(took_s, 1)},
                    )
                    self._stuck[record.pid] = name
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(record.pid, signal.SIGKILL)
            await asyncio.sleep(min(_WATCHED_EVERY_S, limit_s / 4))

    def _read_current(self, record: ExecutorRecord) -> tuple[str, int]:
        try:
            return parse_current(self._current_path(record.executor_id).read_bytes())
        except OSError:
            return "", 0

    async def close(self) -> None:
        """End all executors: SIGTERM, and SIGKILL after some seconds."""
        ending = [record for record in self._by_pid.values() if record.is_alive]
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for record in ending:
                if record.is_alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(record.pid, signum)
            deadline = time.monotonic() + _ENDS_WITHIN_S
            while any(r.is_alive for r in ending) and time.monotonic() < deadline:  # noqa: ASYNC110  # there is no event
                await asyncio.sleep(_POLL_S)
        for record in ending:
            if not record.is_alive:
                self._forget(record)

    def _find(self, device: str) -> ExecutorRecord | None:
        return next((r for r in self._by_pid.values() if r.device == device and r.is_alive), None)

    async def _start(self, device: str) -> ExecutorRecord:
        for record in [r for r in self._by_pid.values() if r.device == device]:
            self._forget(record)
        executor_id = subjects.executor_id(time.time_ns(), self._node)
        start = ExecutorStart(
            executor_id=executor_id,
            node=self._node,
            device=device,
            log_path=str(self._log_path(executor_id)),
            current_path=str(self._current_path(executor_id)),
            environment=self._environment,
        )
        pid = await self._launcher.launch(start)
        started = process_start(pid)
        if started is None:
            raise EngineFailed(f"The executor of {device} has exited: `thaw logs` has its log")
        record = ExecutorRecord(executor_id=executor_id, device=device, pid=pid, process_start=started)
        self._by_pid[pid] = record
        self._culprits.pop(pid, None)
        self._stuck.pop(pid, None)
        self._silent.discard(pid)
        self._silences.pop(pid, None)
        try:
            write_record(self._record_path(executor_id), record.model_dump_json())
            self._prune_logs()
        except OSError as e:  # the executor serves; only the next agent will not find it
            log.error("failed to write an executor's record", extra={"executor": executor_id, "error": str(e)})
        log.info("executor started", extra={"executor": executor_id, "device": device, "pid": pid})
        return record

    def _forget(self, record: ExecutorRecord) -> None:
        self._culprits = {record.pid: self.culprit(record.pid)}  # its instances' exits may be handled later
        self._by_pid.pop(record.pid, None)
        for path in (self._record_path(record.executor_id), self._current_path(record.executor_id)):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:  # the next agent finds that its process has ended
                log.error("failed to remove an executor's record", extra={"path": str(path), "error": str(e)})

    def _prune_logs(self) -> None:
        running = {self._log_path(record.executor_id) for record in self._by_pid.values()}
        ended = [path for path in self._logs.glob("*.executor.log") if path not in running]
        for path in sort_newest_first(ended)[KEPT_LOGS:]:
            path.unlink(missing_ok=True)
            path.with_name(path.name + ASIDE).unlink(missing_ok=True)

    def _record_path(self, executor_id: str) -> Path:
        return self._directory / f"{executor_id}.json"

    def _current_path(self, executor_id: str) -> Path:
        return self._directory / f"{executor_id}.current"

    def _log_path(self, executor_id: str) -> Path:
        return self._logs / f"{executor_id}.executor.log"
