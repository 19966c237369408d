"""A supervisor killed at any moment loses no process: its successor adopts them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launcher import Thaw, until
from tests.support.mesh import kill
from tests.support.stopping import killed_at_exit
from thaw.errors import CommandError
from thaw.launcher import control
from thaw.launcher.home import Home
from thaw.launcher.processes import MARK, identify
from thaw.launcher.servers import postgres_directories
from thaw.launcher.services import Program
from thaw.launcher.starting import Starter
from thaw.launcher.status import read_status
from thaw.launcher.supervisor import Supervisor
from thaw.launcher.watching import Watcher, limits_of

UNRECORDED = ("postgres", "scheduler", "migrator", "loader.node-0", "nodeagent.node-0", "gateway")

LISTENS = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def thaw() -> Iterator[Thaw]:
    thaw = Thaw(THAW_ZYGOTE="false")  # no test starts an engine
    yield thaw
    thaw.close()


def pids(thaw: Thaw) -> dict[str, int]:
    status = json.loads((thaw.home / "run" / "supervisor.json").read_text())
    return {name: s["process"]["pid"] for name, s in status["services"].items() if s["process"]}


def test_processes_missing_from_the_status_are_adopted(thaw: Thaw) -> None:
    thaw.json("up", "--detach", "--port", str(thaw.port))
    before = pids(thaw)
    assert set(before) == {"nats", *UNRECORDED}
    file = thaw.home / "run" / "supervisor.json"
    supervisor = json.loads(file.read_text())["supervisor"]["pid"]
    kill(supervisor)
    status = json.loads(file.read_text())
    for name in UNRECORDED:  # as if it had been killed before it recorded them
        status["services"][name]["process"] = None
    file.write_text(json.dumps(status))
    thaw.json("up", "--detach", "--port", str(thaw.port))
    until(lambda: set(pids(thaw)) == set(before), what="every service is recorded again")
    assert pids(thaw) == before
    modules = [process.cmdline()[-1] for process in thaw.processes()]
    assert modules.count("services.gateway") == 1, modules


def test_adopted_service_that_waits_for_its_turn_stays_in_the_status(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir(parents=True, mode=0o700)
    survivor = identify(psutil.Process().pid)
    assert survivor is not None
    programs = (Program("nats", ("true",)), Program("gateway", ("true",), starts_after=("nats",)))
    supervisor = Supervisor(home, programs, {"gateway": survivor}, Watcher(home, limits_of({})), Starter(home, {}))
    supervisor._write_status()
    status = read_status(home)
    assert status is not None
    assert status.services["gateway"].process == survivor
    assert status.services["nats"].process is None


@pytest.fixture
def unreaped() -> Iterator[None]:
    """Leave orphans as zombies while the test runs, as an init does that reaps none."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = {child.pid for child in psutil.Process().children()}
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, os.strerror(ctypes.get_errno())
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
    for child in psutil.Process().children():
        if child.pid not in before:
            os.waitpid(child.pid, 0)


@pytest.mark.usefixtures("unreaped")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process adopt orphans")
def test_postgres_restarts_although_its_killed_process_is_a_zombie() -> None:
    thaw = Thaw(THAW_ZYGOTE="false")
    try:
        thaw.json("up", "--detach", "--port", str(thaw.port))
        before = pids(thaw)
        for name in ("supervisor", "postgres"):
            kill(thaw.pid(name))
        assert psutil.Process(before["postgres"]).status() == psutil.STATUS_ZOMBIE
        thaw.json("up", "--detach", "--port", str(thaw.port))
        after = pids(thaw)
        assert {name for name in before if before[name] != after[name]} == {"postgres"}
        kill(thaw.pid("supervisor"))
        thaw.json("up", "--detach", "--port", str(thaw.port))
        adopted = thaw.pid("postgres")
        assert adopted == after["postgres"]
        kill(adopted)  # becomes a zombie, too: its supervisor is not its parent
        assert psutil.Process(adopted).status() == psutil.STATUS_ZOMBIE
        thaw.await_replaced("postgres", adopted)
        until(lambda: thaw.status("postgres")["status"] == "ready", what="PostgreSQL is ready")
        assert thaw.status("postgres")["failures"] == 1
    finally:
        thaw.close()


def test_supervisor_that_cannot_start_leaves_the_services_running(thaw: Thaw) -> None:
    thaw.json("up", "--detach", "--port", str(thaw.port))
    before = pids(thaw)
    for name in ("supervisor", "postgres"):
        kill(thaw.pid(name))
    (version,) = [path for d in postgres_directories(Home(thaw.home)) if (path := d / "PG_VERSION").exists()]
    right = version.read_text()
    version.write_text("9.6\n")
    error = thaw.error("up", "--detach", "--port", str(thaw.port))
    assert error["code"] == "start_failed"
    assert "PostgreSQL could not be set up" in error["message"]
    version.write_text(right)
    thaw.json("up", "--detach", "--port", str(thaw.port))
    after = pids(thaw)
    assert {name for name in before if before[name] != after[name]} == {"postgres"}


@pytest.mark.parametrize("ours", [True, False])
def test_port_held_by_a_process_of_this_mesh_counts_as_free(tmp_path: Path, *, ours: bool) -> None:
    """A lost status names none of the mesh's processes; `launch` finds and ends them."""
    environment = {**os.environ, MARK: "gateway", "THAW_HOME": str(tmp_path if ours else tmp_path / "another")}
    home = Home(tmp_path)
    home.create()
    command = [sys.executable, "-c", LISTENS]
    with killed_at_exit(
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        if ours:
            control.check_unused(home, "127.0.0.1", port)
        else:
            with pytest.raises(CommandError, match=rf"Port {port} .*pid {holder.pid}"):
                control.check_unused(home, "127.0.0.1", port)
        with pytest.raises(CommandError, match="is taken"):
            control.check_port("127.0.0.1", port)
        holder.kill()
