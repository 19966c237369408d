"""A service reports to its watcher once it serves.

A heartbeat alone only shows that its loop runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.watchdog.decision import Limits
from shared.watchdog.heartbeat import Ear, Heart
from thaw.launcher.home import Home
from thaw.launcher.services import Program
from thaw.launcher.watching import Watcher


async def test_heartbeat_does_not_imply_readiness_and_later_ones_repeat_it(tmp_path: Path) -> None:
    ear = Ear(tmp_path / "s")
    heart = Heart(str(ear.path))
    heart.beat_on(asyncio.get_running_loop())
    ear.collect()
    assert (ear.beats, ear.is_ready) == (1, False)
    heart.report_ready()
    ear.collect()
    assert (ear.beats, ear.is_ready) == (1, True)
    ear.close()
    again = Ear(tmp_path / "s")  # of a supervisor that took over
    heart.beat_on(asyncio.get_running_loop())
    again.collect()
    assert (again.beats, again.is_ready) == (1, True)
    again.close()
    heart.end()


async def test_the_supervisor_waits_for_the_report(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir()
    watcher, program = Watcher(home, Limits(0)), Program("migrator", ("true",))
    environment = watcher.prepare(program)
    ready = asyncio.create_task(watcher.until_ready("migrator"))
    heart = Heart(environment["NOTIFY_SOCKET"])
    heart.beat_on(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ready), 0.2)
    heart.report_ready()
    await asyncio.wait_for(ready, 60)
    watcher.close()
    heart.end()
