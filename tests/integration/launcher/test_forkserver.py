"""The fork server, its forks, and what happens without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.forking import executed
from tests.support.launcher import ROOT, Thaw
from tests.support.stopping import stop
from thaw.launcher.forkserver import client
from thaw.launcher.forkserver.client import ForkServer, ForkServerFailed
from thaw.launcher.home import Home
from thaw.launcher.services import Program
from thaw.launcher.starting import Starter

MODULE = "tests.support.forkable"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forks siblings")


class Forked:
    """A process that `server` forks, with pipes as its input and output."""

    def __init__(
        self, server: ForkServer, *arguments: str, session: bool = True, directory: Path = ROOT, **environment: str
    ) -> None:
        lines, self.input = os.pipe()
        self.output, written = os.pipe()
        try:
            self.pid = server.start(
                MODULE,
                *arguments,
                environment=environment,
                directory=directory,
                files={0: lines, 1: written, 2: 2, 40: written},
                session=session,
            )
        finally:
            os.close(lines)
            os.close(written)

    def known(self) -> dict[str, Any]:
        with os.fdopen(self.output) as lines:
            found = json.loads(lines.readline())
        assert isinstance(found, dict)
        return found

    def end(self, status: int) -> int:
        os.write(self.input, f"{status}\n".encode())
        os.close(self.input)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer((MODULE,), os.environ, ROOT)
    try:
        assert server.await_ready(60)
        yield server
    finally:
        server.close()


def test_forked_process_is_the_callers_child_and_has_what_it_was_given(server: ForkServer, tmp_path: Path) -> None:
    forked = Forked(server, "a", "b c", directory=tmp_path, NAME="välue", PATH="/bin")
    known = forked.known()
    assert known["arguments"] == ["a", "b c"]
    assert known["environment"] == {"NAME": "välue", "PATH": "/bin"}
    assert known["directory"] == str(tmp_path)
    assert known["leads_session"]
    assert known["parent"] == os.getpid()
    assert known["files"] == [0, 1, 2, 40]
    assert (known["threads"], known["signals_itself"]) == (1, True)
    process = psutil.Process(forked.pid)
    assert process.cmdline() == [sys.executable, "-m", MODULE, "a", "b c"]
    assert process.environ() == {"NAME": "välue", "PATH": "/bin"}
    assert forked.end(7) == 7


def test_forks_are_independent_of_each_other_and_of_the_server(server: ForkServer) -> None:
    first, second = Forked(server), Forked(server, session=False)
    os.kill(first.pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(first.pid, 0)[1]) == -signal.SIGKILL
    server.close()
    assert not second.known()["leads_session"]
    assert second.end(3) == 3


def test_server_ends_with_its_client() -> None:
    server = ForkServer((MODULE,), os.environ, ROOT)
    assert server.await_ready(60)
    process = psutil.Process(server.pid)
    server.close()
    assert not process.is_running()


def test_module_that_cannot_be_imported_makes_no_server() -> None:
    server = ForkServer(("tests.support.no_such_module",), os.environ, ROOT, subprocess.DEVNULL)
    try:
        assert not server.await_ready(60)
        with pytest.raises(ForkServerFailed):
            server.start(MODULE, environment={}, directory=ROOT, files={}, session=True)
    finally:
        server.close()


def test_start_that_was_given_up_does_not_happen_later(server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server that hangs must not start a second gateway when it continues."""
    monkeypatch.setattr(client, "_START_WITHIN_S", 0.05)
    before = {p.pid for p in psutil.Process().children()}
    stop(server.pid)
    with (tmp_path / "output").open("w") as output, pytest.raises(ForkServerFailed):
        server.start(MODULE, environment={}, directory=ROOT, files={1: output.fileno()}, session=True)
    os.kill(server.pid, signal.SIGCONT)
    monkeypatch.undo()
    later = Forked(server)
    assert later.end(0) == 0
    given_up = [p for p in psutil.Process().children() if p.pid not in before]
    assert [os.waitstatus_to_exitcode(os.waitpid(p.pid, 0)[1]) for p in given_up] == [0]
    assert (tmp_path / "output").read_text() == ""


async def test_program_starts_without_a_fork_server_and_the_next_one_with_a_new_server(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    starter = Starter(home, {"THAW_GATEWAY_PORT": "eighty"})
    program = Program("gateway", (sys.executable, "-m", "services.gateway"))
    try:
        before = set(_fork_servers())
        starter.prepare()
        (server,) = set(_fork_servers()) - before
        server.kill()
        for _ in range(3):
            with executed():  # the tests' own fork server does not help
                started = await starter.start(program, {"THAW_GATEWAY_PORT": "eighty"}, {})
            async with asyncio.timeout(60):
                assert await started.wait() == 2
        assert home.log("gateway").read_text().count("THAW_GATEWAY_PORT") == 3
        assert set(_fork_servers()) - before - {server}
    finally:
        starter.close()


def test_services_of_a_mesh_restart_with_and_without_the_fork_server() -> None:
    thaw = Thaw(THAW_ZYGOTE="false")
    try:
        thaw.json("up", "--detach", "--port", str(thaw.port))
        (server,) = _servers(thaw)
        services = ("gateway", "nodeagent.node-0", "loader.node-0", "scheduler", "migrator")
        assert server.pid not in {thaw.pid(name) for name in services}
        thaw.await_replaced("migrator", thaw.kill("migrator"))
        assert [p.pid for p in _servers(thaw)] == [server.pid]
        server.kill()
        thaw.await_replaced("migrator", thaw.kill("migrator"))
        thaw.await_replaced("gateway", thaw.kill("gateway"))
        assert [p.pid for p in _servers(thaw) if p.pid != server.pid]
    finally:
        thaw.close()


def _fork_servers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and client.MODULE in p.cmdline()]


def _servers(thaw: Thaw) -> list[psutil.Process]:
    return [p for p in thaw.processes() if client.MODULE in p.cmdline()]
