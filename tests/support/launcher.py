"""`thaw` as users run it, with a state directory and ports of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from services.enginehost.runtimes import reaper
from shared.contracts.segment import segment_prefix
from tests.support import forking, prepared_database
from tests.support.servers import kept_port
from thaw.cli.app import main
from thaw.launcher.processes import MARK

ROOT = Path(__file__).resolve().parents[2]
_PRIVATE = (
    "THAW_URL",
    "THAW_HOME",
    "THAW_ADMIN_KEY",
    "THAW_API_KEY",
    "THAW_NATS_URL",
    "THAW_DATABASE_URL",
    "THAW_GATEWAY_PORT",
    MARK,
)

AWAY = ("unreachable", "unavailable", "deadline_exceeded")
"""Codes of errors that last until the scheduler has restarted, or runs again on a busy machine."""
_READING = ("doctor", "explain", "keys list", "models list", "models show", "node list", "ps", "pull --list", "trace", "usage")
"""Verbs that change nothing: one whose deadline passed is run again."""
_RUN_WITHIN_S = 600.0


class Thaw:
    """Runs `thaw` with a THAW_HOME of its own.

    `close` removes it, and fails if any process or file of it is left.
    """

    def __init__(self, **environment: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="thaw-e2e-", dir="/tmp")).resolve()
        self._kept = [kept_port()]
        self.port = int(self._kept[0].getsockname()[1])
        self.environment = {k: v for k, v in os.environ.items() if k not in _PRIVATE} | {
            "THAW_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "THAW_ENGINE_THREADS": "1",
            # These tests are about cold starts; tests of suspension enable swap explicitly.
            "THAW_SUSPEND": "off",
            # Populating memory for future loads takes over a CPU second; test_dram.py tests it.
            "THAW_DRAM_READY_BYTES": "0",
            "THAW_PRETOUCH": "off",
            **environment,
        }

    def keep_port(self, setting: str) -> int:
        """Set a setting to a port that is kept until `close`, and return the port."""
        self._kept.append(kept_port())
        port = int(self._kept[-1].getsockname()[1])
        self.environment[setting] = str(port)
        return port

    def popen(self, *arguments: str, prefix: tuple[str, ...] = (), **options: Any) -> subprocess.Popen[str]:
        """Start `thaw`.

        Args:
            prefix: A command that runs its arguments.
        """
        if arguments[0] == "up" and forking.is_enabled() and not self.environment.get("THAW_DATABASE_URL"):
            prepared_database.provide(self.home)
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "thaw.cli.app", *arguments],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            **options,
        )

    def run(self, *arguments: str, timeout: float = _RUN_WITHIN_S) -> subprocess.CompletedProcess[str]:
        process = self.popen(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def inside(self, *arguments: str) -> tuple[int, str]:
        """Run a verb in this process, faster than in a new one.

        Returns:
            Its status and standard output.
        """
        out = io.StringIO()
        before = {k: v for k, v in os.environ.items() if k in _PRIVATE or k.startswith("THAW_")}
        for key in _PRIVATE & os.environ.keys():
            del os.environ[key]
        os.environ.update({k: v for k, v in self.environment.items() if k.startswith("THAW_")})
        try:
            with contextlib.redirect_stdout(out):
                status = main(list(arguments))
        finally:
            for key in [k for k in os.environ if k.startswith("THAW_")]:
                del os.environ[key]
            os.environ.update(before)
        return status, out.getvalue()

    def json(self, *arguments: str, timeout: float = _RUN_WITHIN_S) -> dict[str, Any]:
        """Return the JSON document of a verb that must succeed and print nothing else."""
        if arguments[0] in ("up", "down", "demo"):  # they leave multiprocessing's resource tracker in their process
            done = self.run(*arguments, "--json", timeout=timeout)
            status, out, err = done.returncode, done.stdout, done.stderr
        else:
            (status, out), err = self._read(*arguments, "--json"), ""
        assert status == 0, f"{arguments}: {out}{err}{self.last_words()}"
        document = json.loads(out)
        assert isinstance(document, dict)
        return document

    def _read(self, *arguments: str) -> tuple[int, str]:
        """Run a verb as `inside`; again after a passed deadline if it changes nothing."""
        is_reading = " ".join(arguments).startswith(_READING)
        found: list[tuple[int, str]] = []

        def is_answered() -> bool:
            found[:] = [self.inside(*arguments)]
            status, out = found[0]
            return not (is_reading and status != 0 and '"deadline_exceeded"' in out)

        until(is_answered, what=f"thaw {' '.join(arguments)} is answered in time")
        return found[0]

    def error(self, *arguments: str, status: int = 1) -> dict[str, Any]:
        """Return the error of a verb that must fail."""
        ended, out = self.inside(*arguments, "--json")
        assert ended == status, out
        error = json.loads(out)["error"]
        assert isinstance(error, dict)
        return error

    @property
    def endpoints(self) -> dict[str, str]:
        found = json.loads((self.home / "run" / "endpoints.json").read_text())
        assert isinstance(found, dict)
        return found

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pid(self, service: str) -> int:
        """Return the pid of a supervised service."""
        process = self._status["supervisor"] if service == "supervisor" else self.status(service)["process"]
        return int(process["pid"])

    def status(self, service: str) -> dict[str, Any]:
        """Return the supervisor's status of a service."""
        found = self._status["services"][service]
        assert isinstance(found, dict)
        return found

    @property
    def _status(self) -> dict[str, Any]:
        found = json.loads((self.home / "run" / "supervisor.json").read_text())
        assert isinstance(found, dict)
        return found

    def cluster(self) -> dict[str, Any]:
        """Return the document of `thaw ps`, once a scheduler answers.

        The test may have killed the only one just before. While the scheduler waits for a stopped
        database, requests have no reply.
        """
        found: dict[str, Any] = {}

        def answered() -> bool:
            status, out = self.inside("ps", "--json")
            found.update(json.loads(out))
            assert status == 0 or found["error"]["code"] in AWAY, f"{out}{self.last_words()}"
            if status != 0:
                found.clear()
            return bool(found)

        until(answered, what="the scheduler answers")
        return found

    def instances(self, model: str) -> list[dict[str, Any]]:
        """Return the model's ready instances."""
        return [i for n in self.cluster()["nodes"] for i in n["instances"] if i["model"] == model and i["state"] == "ready"]

    def instance(self, model: str) -> dict[str, Any]:
        """Return the model's one ready instance.

        An engine may respond before its node has reported it ready.
        """
        found: list[dict[str, Any]] = []

        def is_one() -> bool:
            found[:] = self.instances(model)
            return len(found) == 1

        until(is_one, what=lambda: f"one instance of {model} is ready, of {self.instances_in_words()}{self.last_words()}")
        return found[0]

    def instances_in_words(self) -> str:
        """Return all instances with their states, for a failed test."""
        found = [i for n in self.cluster()["nodes"] for i in n["instances"]]
        return ", ".join(f"{i['instance_id']} of {i['model']}: {i['state']}" for i in found) or "no instances"

    def plan(self, model: str) -> dict[str, Any]:
        """Return the model's last plan once it has ended: a start may respond before."""
        found: list[dict[str, Any]] = []

        def has_ended() -> bool:
            found[:] = [self.json("explain", model)]
            return bool(found[0]["outcome"] != "pending")

        until(has_ended, what=f"the start of {model} has ended")
        return found[0]

    def ready(self) -> bool:
        """Return whether the gateway reports that it is ready."""
        try:
            # Without reading certificates, which takes 20 ms: waits call this repeatedly.
            return httpx.get(f"{self.url}/ready", timeout=30, verify=False).is_success
        except httpx.HTTPError:
            return False

    def kill(self, service: str) -> int:
        """Kill a service with SIGKILL; return its former pid."""
        process = psutil.Process(self.pid(service))
        process.kill()
        psutil.wait_procs([process], timeout=60)
        return process.pid

    def replaced(self, service: str, old: int) -> bool:
        """Return whether the supervisor has started a replacement."""
        process = self._status["services"].get(service, {}).get("process")
        return process is not None and int(process["pid"]) != old

    def await_replaced(self, service: str, old: int) -> None:
        until(lambda: self.replaced(service, old), what=f"{service} is started again")
        until(self.ready, what="the gateway is ready")
        self.cluster()

    def last_words(self) -> str:
        """Return the ends of all logs, for a failed test."""
        return "".join(f"\n== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]) for log in self.logs())

    def logs(self) -> list[Path]:
        """Return all logs of the mesh; NATS makes and removes directories meanwhile."""
        found = (Path(directory, name) for directory, _, names in os.walk(self.home) for name in names if name.endswith(".log"))
        return sorted(log for log in found if log.is_file())  # a shared instance's is a link

    def processes(self) -> list[psutil.Process]:
        """Return every process that was started under this home."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get("THAW_HOME") == str(self.home) or str(self.home) in " ".join(process.cmdline())
                if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):  # it has ended meanwhile
                continue
        return found

    def segments(self) -> list[Path]:
        """Return the mesh's shared memory files."""
        prefixes = tuple(segment_prefix(self.home, f"node-{i}") for i in range(4))
        return [p for p in Path("/dev/shm").iterdir() if p.name.startswith(prefixes)]

    def shared_bytes(self) -> int:
        """Return the bytes of the mesh's files under /dev/shm."""
        total = 0
        for path in self.segments():
            with contextlib.suppress(FileNotFoundError):  # it is removed meanwhile
                total += path.stat().st_blocks * 512
        return total

    def assert_nothing_left(self) -> None:
        assert [f"{p.pid} {' '.join(command_of(p))}" for p in self.processes()] == []
        assert self.segments() == []

    def close(self) -> None:
        try:
            if (self.home / "run" / "supervisor.json").exists():
                done = self.run("down")
                assert done.returncode == 0, done.stdout + done.stderr
            self.assert_nothing_left()
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    # It ends processes without a mark, such as vLLM's.
                    if reaper.__file__ not in process.cmdline():
                        process.kill()
            shutil.rmtree(self.home, ignore_errors=True)
            for kept in self._kept:
                kept.close()


def command_of(process: psutil.Process) -> list[str]:
    """Return the command line of a process; none if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


T = TypeVar("T", bound=Thaw)


@contextlib.contextmanager
def running(mesh: T, nodes: Mapping[str, Any], models: Sequence[Mapping[str, Any]], **defaults: Any) -> Iterator[T]:
    """Start a mesh with these nodes and models, and stop it in the end."""
    document = {"mesh": {"port": mesh.port, "nodes": nodes}, "defaults": {"keep_alive": -1, **defaults}, "models": models}
    (mesh.home / "thaw.yaml").write_text(json.dumps(document))
    try:
        mesh.json("up", "--detach", "--config", str(mesh.home / "thaw.yaml"))
        yield mesh
    finally:
        mesh.close()


def until(condition: Callable[[], bool], within: float = 120.0, what: str | Callable[[], str] = "") -> None:
    """Poll until `condition` is true, for conditions without an event.

    The longer it takes, the rarer: a condition often asks the whole mesh, beside other tests.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within, f"not within {within} s: {(what() if callable(what) else what) or condition}"
        time.sleep(min(0.2, max(0.05, waited / 20)))
