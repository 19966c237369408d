"""A supervisor killed at any moment loses no process: its successor adopts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launcher import Thaw, until
from tests.support.mesh import kill
from thaw.launcher.home import Home
from thaw.launcher.processes import identify
from thaw.launcher.services import Program
from thaw.launcher.status import read_status
from thaw.launcher.supervisor import Supervisor
from thaw.launcher.watching import Watcher, limits_of

UNRECORDED = ("postgres", "scheduler", "migrator", "loader.node-0", "nodeagent.node-0", "gateway")


@pytest.fixture
def thaw() -> Iterator[Thaw]:
    thaw = Thaw()
    yield thaw
    thaw.close()


def pids(thaw: Thaw) -> dict[str, int]:
    status = json.loads((thaw.home / "run" / "supervisor.json").read_text())
    return {name: s["process"]["pid"] for name, s in status["services"].items() if s["process"]}


def test_processes_that_the_status_does_not_name_are_taken_over(thaw: Thaw) -> None:
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


def test_a_survivor_that_waits_for_its_turn_stays_in_the_status(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir(parents=True, mode=0o700)
    survivor = identify(psutil.Process().pid)
    assert survivor is not None
    programs = (Program("nats", ("true",)), Program("gateway", ("true",), starts_after=("nats",)))
    supervisor = Supervisor(home, programs, {"gateway": survivor}, Watcher(home, limits_of({})))
    supervisor._write_status()
    status = read_status(home)
    assert status is not None
    assert status.services["gateway"].process == survivor
    assert status.services["nats"].process is None
