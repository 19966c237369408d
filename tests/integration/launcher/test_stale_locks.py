"""A killed PostgreSQL starts again, whatever process its lock files name."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launcher import until
from tests.support.servers import kept_port
from tests.support.stopping import killed_at_exit, stop
from thaw.launcher import stale_locks
from thaw.launcher.home import Home
from thaw.launcher.plan import MeshPlan, credentials_of
from thaw.launcher.servers import locate_postgres, prepare_postgres
from thaw.launcher.stale_locks import LockFile, remove_stale_locks


class Server:
    """A PostgreSQL server, as the supervisor starts it, in a state directory of its own."""

    def __init__(self, directory: Path) -> None:
        home = Home(directory.resolve())
        home.create()
        self.postgres = locate_postgres(home)
        self._kept = kept_port()
        self._plan = MeshPlan(credentials=credentials_of(home), nats_port=1, postgres_port=self._kept.getsockname()[1])
        prepare_postgres(self.postgres, self._plan)
        self._log = directory / "log"
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._started[-1].pid)

    @property
    def locks(self) -> tuple[Path, Path]:
        return self.postgres.data / "postmaster.pid", self.postgres.sockets / f".s.PGSQL.{self._plan.postgres_port}.lock"

    @property
    def segment(self) -> tuple[int, int]:
        lock = LockFile.read(self.locks[0])
        assert lock is not None
        assert lock.segment is not None
        return lock.segment

    def start(self) -> bool:
        """Start the server; return whether it runs."""
        with self._log.open("wb") as log:
            command = self.postgres.server_command(self._plan)
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=self.postgres.sockets))
        until(lambda: self.is_ready() or self._started[-1].poll() is not None, what="PostgreSQL is ready or has ended")
        return self.is_ready()

    def is_ready(self) -> bool:
        """Whether the lock file names the server that was started last, and says "ready"."""
        try:
            lines = self.locks[0].read_text().splitlines()
        except OSError:
            return False
        own = lines[:1] == [str(self._started[-1].pid)]  # the file is empty for a moment
        return own and lines[-1].strip() == "ready" and self._started[-1].poll() is None

    def refuses_to_start(self, why: str) -> bool:
        assert not self.start(), self._log.read_text()
        assert why in self._log.read_text()
        return True

    def kill(self, *, reap: bool = True) -> list[psutil.Process]:
        """Kill the server alone; return its children. Unless reaped, it stays as a zombie."""
        children = self.process.children()
        os.kill(self.process.pid, signal.SIGKILL)
        if reap:
            self._started[-1].wait(60)
        else:
            until(lambda: self.process.status() == psutil.STATUS_ZOMBIE, what="the server is a zombie")
        return children

    def names(self, pid: int) -> None:
        """Let both lock files name another process."""
        for path in self.locks:
            path.write_text("\n".join([str(pid), *path.read_text().split("\n")[1:]]))

    def clear(self) -> None:
        """Kill all processes, and remove the lock files."""
        for process in stale_locks._processes_of(self.postgres.data):
            process.send(signal.SIGKILL)
        for started in self._started:
            started.wait(60)
        until(lambda: not stale_locks._processes_of(self.postgres.data), what="the server's children have ended")
        for path in self.locks:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._kept.close()


@pytest.fixture(scope="module")
def prepared() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="thaw-pg-") as directory:
        Path(directory).chmod(0o755)
        with contextlib.closing(Server(Path(directory))) as server:
            yield server


@pytest.fixture
def server(prepared: Server) -> Iterator[Server]:
    try:
        assert prepared.start()
        yield prepared
    finally:
        prepared.clear()


def test_a_zombie_does_not_keep_postgres_from_starting(server: Server) -> None:
    psutil.wait_procs(server.kill(reap=False), timeout=60)
    assert server.refuses_to_start("lock file")
    remove_stale_locks(server.postgres)
    assert not any(path.exists() for path in server.locks)
    assert server.start()


def test_a_pid_of_another_process_is_no_server(server: Server, tmp_path: Path) -> None:
    shutil.copy(shutil.which("sleep") or "", tmp_path / "postgres")  # of another data directory
    for program in ("sleep", str(tmp_path / "postgres")):
        with killed_at_exit(subprocess.Popen([program, "600"], cwd=tmp_path)) as stranger:
            psutil.wait_procs(server.kill(), timeout=60)
            server.names(stranger.pid)
            assert server.refuses_to_start("lock file")
            remove_stale_locks(server.postgres)
            assert not any(path.exists() for path in server.locks)
            assert server.start()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_lock_files_of_a_living_server_stay(server: Server, *, stopped: bool) -> None:
    if stopped:
        stop(server.process.pid)
    remove_stale_locks(server.postgres)
    server.process.resume()
    assert all(path.exists() for path in server.locks)
    assert server.is_ready()


def test_process_that_cannot_be_examined_counts_as_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "samefile", refuse)
    remove_stale_locks(server.postgres)
    monkeypatch.undo()
    assert all(path.exists() for path in server.locks)
    assert server.is_ready()


def test_processes_of_a_killed_server_are_ended_before_a_restart(server: Server) -> None:
    """A process of the killed server that still writes would corrupt the data."""
    stop(*(child.pid for child in server.process.children()))
    segment, children = server.segment, server.kill()
    assert server.refuses_to_start("shared memory")
    remove_stale_locks(server.postgres)
    assert not stale_locks._is_used(segment)
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert server.start()


def test_shared_memory_in_use_keeps_the_lock_files(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_locks, "_BOUND_S", 0.1)
    stop(*(child.pid for child in server.process.children()))
    server.kill()
    remove_stale_locks(server.postgres)
    assert all(path.exists() for path in server.locks)
