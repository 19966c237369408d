"""`python -m shared.watchdog -- COMMAND`, the main process of each container.

The tests show what it restarts, forwards, and leaves behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launcher import ROOT, until

# A service like all others. Its loop blocks for good once a file exists; it exits with 3 once
# another one does. The file `slow` makes it take 1.5 s for what it does at SIGABRT.
SERVICE = """
import asyncio, os, signal, sys, time
from pathlib import Path
from shared.runtime import run_service
from shared.settings import CommonSettings
here = Path(sys.argv[1])
def dump(*_):
    time.sleep(1.5)
    (here / "dumped").write_text("")
    os._exit(1)
async def app(settings, stop):
    (here / "started").write_text("")
    while not stop.is_set():
        if (here / "block").exists():
            (here / "block").unlink()
            if (here / "slow").exists():
                signal.signal(signal.SIGABRT, dump)
            time.sleep(3600)
        if (here / "end").exists():
            return 3
        await asyncio.sleep(0.05)
    return 0
sys.exit(run_service("test", CommonSettings, app))
"""


class Watched:
    """The watchdog and the service under it."""

    def __init__(self, here: Path, limit_s: float = 2.0) -> None:
        self.here = here
        self.log = here / "log"
        environment = {**os.environ, "THAW_WATCHDOG_S": str(limit_s), "PYTHONPATH": str(ROOT), "THAW_HOME": str(here)}
        environment.pop("NOTIFY_SOCKET", None)
        with self.log.open("wb") as log:
            self.parent = subprocess.Popen(
                [sys.executable, "-m", "shared.watchdog", "--", sys.executable, "-c", SERVICE, str(here)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until((here / "started").exists, what=f"the service runs: {self.log.read_text()}")

    @property
    def service(self) -> psutil.Process:
        (child,) = psutil.Process(self.parent.pid).children()
        return child

    def await_another(self, old: int) -> None:
        def another() -> bool:
            pids = [c.pid for c in psutil.Process(self.parent.pid).children()]
            return bool(pids) and pids != [old]

        until(another, what=f"the service is started again: {self.log.read_text()}")
        until((self.here / "started").exists, what=f"the service runs again: {self.log.read_text()}")

    def restarts(self) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"] == "restarting a hung service"]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    directory = Path(watched.service.environ()["NOTIFY_SOCKET"]).parent
    yield watched
    if watched.parent.poll() is None:
        watched.parent.send_signal(signal.SIGTERM)
        assert watched.parent.wait(60) == 0
    assert not directory.exists()


def test_a_stopped_service_is_replaced(watched: Watched) -> None:
    old = watched.service.pid
    (watched.here / "started").unlink()
    os.kill(old, signal.SIGSTOP)
    watched.await_another(old)
    (restart,) = watched.restarts()
    assert restart["pid"] == old
    assert "the process is stopped" in str(restart["reason"])
    assert watched.parent.poll() is None


def test_blocked_event_loop_is_logged_with_its_stack_and_restarted(watched: Watched) -> None:
    old = watched.service.pid
    (watched.here / "started").unlink()
    (watched.here / "block").write_text("")
    watched.await_another(old)
    (restart,) = watched.restarts()
    assert "stopped" not in str(restart["reason"])
    log = watched.log.read_text()
    assert "Fatal Python error: Aborted" in log
    assert "in app" in log


def test_hung_service_has_time_to_write_its_stack(watched: Watched) -> None:
    old = watched.service.pid
    (watched.here / "started").unlink()
    (watched.here / "slow").write_text("")
    (watched.here / "block").write_text("")
    watched.await_another(old)
    assert (watched.here / "dumped").exists()


def test_exit_status_of_the_service_is_passed_on(watched: Watched) -> None:
    (watched.here / "end").write_text("")
    assert watched.parent.wait(60) == 3


def test_killed_service_ends_the_watchdog_with_its_signal(watched: Watched) -> None:
    watched.service.kill()
    assert watched.parent.wait(60) == 128 + signal.SIGKILL


def test_stopped_process_tree_is_not_restarted_when_it_continues(tmp_path: Path) -> None:
    """A stopped process tree is left alone when it continues.

    After a suspended laptop or `docker pause` the watchdog did not run either, however short its
    limit.
    """
    watched = Watched(tmp_path, limit_s=3.0)
    service = watched.service
    try:
        for pid in (watched.parent.pid, service.pid):
            os.kill(pid, signal.SIGSTOP)
        until(lambda: watched.parent.pid in _stopped(), what="it is stopped")
        with pytest.raises(subprocess.TimeoutExpired):
            watched.parent.wait(4.0)
        for pid in (service.pid, watched.parent.pid):  # in this order: it watches no service that is still stopped
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            watched.parent.wait(2.0)
        assert service.is_running()
        assert not watched.restarts()
    finally:
        watched.parent.send_signal(signal.SIGTERM)
        assert watched.parent.wait(60) == 0


def _stopped() -> set[int]:
    # With a list of facts it leaves out processes that end meanwhile.
    return {p.pid for p in psutil.process_iter(["status"]) if p.info["status"] == psutil.STATUS_STOPPED}


@pytest.mark.parametrize(
    ("arguments", "setting", "status"),
    [([], "10", 2), (["--", "true"], "soon", 2), (["--", "no-such-program"], "10", 127), (["--", "true"], "0", 0)],
)
def test_exit_status_follows_from_the_arguments_and_setting(arguments: list[str], setting: str, status: int) -> None:
    environment = {**os.environ, "THAW_WATCHDOG_S": setting, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "shared.watchdog", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status
    assert bool(done.stderr) == (status != 0)


def test_watchdog_imports_only_small_modules() -> None:
    """The watchdog stays small: it runs beside every service of every container.

    It imports only a little of the standard library.
    """
    script = (
        "import sys; import shared.watchdog.__main__; heavy = {'pydantic', 'asyncio', 'subprocess', 'logging', 'ssl'}"
        "; print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
