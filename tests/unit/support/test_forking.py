"""Test processes are forked from one server of each kind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support import fork_server, forking

THREADS = 4


class Starting:
    """A fork server that takes until every thread starts one, or a moment, to be created."""

    started: list[Starting]
    wanted: threading.Barrier

    def __init__(self, *_: Any, **__: Any) -> None:
        self.started.append(self)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.wanted.wait(0.2)

    def await_ready(self, _within_s: float) -> bool:
        return True


def test_threads_that_start_processes_at_once_share_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    Starting.started, Starting.wanted = [], threading.Barrier(THREADS)
    monkeypatch.setattr(forking, "_servers", {})
    monkeypatch.setattr(forking, "_is_service", False)
    monkeypatch.setattr(forking, "supports_cloning", lambda: True)
    monkeypatch.setattr(forking, "ForkServer", Starting)
    with ThreadPoolExecutor(THREADS) as threads:
        servers = list(threads.map(lambda _: forking._server_for("services.loader", [], {}), range(THREADS)))
    assert len(Starting.started) == 1
    assert [*map(id, servers)] == [id(Starting.started[0])] * THREADS


class Library:
    """Something with a finalizer."""


def test_forked_process_leaves_out_finalizers_of_imports_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weakref.finalize, "_registry", {})  # those of this process run at its exit
    imported, own = Library(), Library()
    first = weakref.finalize(imported, print)
    fork_server._keep_libraries()
    second = weakref.finalize(own, print)
    assert (first.atexit, second.atexit) == (False, True)


def test_workers_of_a_mistyped_path_are_refused_with_the_message_of_pytest() -> None:
    """pytest-xdist alone ends with status 5, and no message."""
    nowhere, nothing = "tests/unit/nowhere", "tests/unit/support/test_examples.py::test_nothing"
    command = [sys.executable, "-m", "pytest", "-n", "2", nothing, nowhere]
    done = subprocess.run(command, cwd=forking.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no tests ran" not in done.stdout
    assert f"not found: {nowhere}" in done.stderr


def test_server_has_no_variables_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb that runs in this process may start it: it must not end with that verb's mesh."""
    found: list[dict[str, str]] = []

    class Server(Starting):
        def __init__(self, _: Any, environment: dict[str, str], *__: Any, **___: Any) -> None:
            found.append(environment)

    monkeypatch.setattr(forking, "_servers", {})
    monkeypatch.setattr(forking, "_is_service", False)
    monkeypatch.setattr(forking, "supports_cloning", lambda: True)
    monkeypatch.setattr(forking, "ForkServer", Server)
    monkeypatch.setenv("THAW_HOME", "/home/of/a/mesh")
    forking._server_for("services.loader", [], {})
    (environment,) = found
    assert "PATH" in environment
    assert not any(name.startswith("THAW_") for name in environment)
