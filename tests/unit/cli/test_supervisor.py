"""The supervisor of `thaw up` while its disk refuses writes."""

from __future__ import annotations

import asyncio
import errno
import sys
from pathlib import Path

import pytest

from shared.watchdog.decision import Limits
from thaw.launcher import supervisor as module
from thaw.launcher.home import Home
from thaw.launcher.lifecycle import StopRequested
from thaw.launcher.services import Program
from thaw.launcher.starting import Starter
from thaw.launcher.status import MeshStatus, read_status
from thaw.launcher.supervisor import Supervisor
from thaw.launcher.watching import Watcher

SLEEPS = ("-c", "import time; time.sleep(60)")


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def home_in(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    for directory in (home.run, home.logs):
        directory.mkdir()
    return home


def supervisor(home: Home, *programs: Program) -> Supervisor:
    return Supervisor(home, programs, {}, Watcher(home, Limits()), Starter(home, {}))


async def run_until_started(watched: Supervisor, home: Home) -> None:
    running = asyncio.create_task(watched.run())
    async with asyncio.timeout(60):
        while not (watched._processes or running.done()):  # noqa: ASYNC110 - the process starts meanwhile
            await asyncio.sleep(0.02)
        watched._events.put_nowait(StopRequested())
        await running


async def test_full_disk_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its services would run on without anything that restarts them."""
    home = home_in(tmp_path)
    attempts: list[str] = []
    publish = module._publish_status

    def refuse_first(home: Home, status: MeshStatus) -> None:
        attempts.append(status.stage)
        if len(attempts) < 4:
            refuse()
        publish(home, status)

    monkeypatch.setattr(module, "_publish_status", refuse_first)
    await run_until_started(supervisor(home, Program("migrator", (sys.executable, *SLEEPS))), home)
    status = read_status(home)
    assert status is not None
    assert {s.status for s in status.services.values()} == {"stopped"}


async def test_start_that_cannot_be_prepared_is_repeated(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    attempts: list[int] = []

    def prepare() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            refuse()

    program = Program("migrator", (sys.executable, *SLEEPS), prepare=prepare)
    await run_until_started(supervisor(home, program), home)
    assert attempts == [0, 1]
