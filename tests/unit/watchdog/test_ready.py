"""A service reports to its watcher once it serves.

A heartbeat alone only shows that its loop runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shared.watchdog.decision import Limits
from shared.watchdog.heartbeat import HeartbeatReceiver, HeartbeatSender
from thaw.launcher.home import Home
from thaw.launcher.services import Program
from thaw.launcher.watching import Watcher


async def test_heartbeat_does_not_imply_readiness_and_later_ones_repeat_it(tmp_path: Path) -> None:
    receiver = HeartbeatReceiver(tmp_path / "s")
    sender = HeartbeatSender(str(receiver.path))
    sender.send_every_second(asyncio.get_running_loop())
    receiver.collect()
    assert (receiver.beats, receiver.is_ready) == (1, False)
    sender.report_ready()
    receiver.collect()
    assert (receiver.beats, receiver.is_ready) == (1, True)
    receiver.close()
    again = HeartbeatReceiver(tmp_path / "s")  # of a supervisor that took over
    sender.send_every_second(asyncio.get_running_loop())
    again.collect()
    assert (again.beats, again.is_ready) == (1, True)
    again.close()
    sender.close()


async def test_the_supervisor_waits_for_the_report(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir()
    watcher, program = Watcher(home, Limits(0)), Program("migrator", ("true",))
    environment = watcher.prepare(program)
    ready = asyncio.create_task(watcher.until_ready("migrator"))
    sender = HeartbeatSender(environment["NOTIFY_SOCKET"])
    sender.send_every_second(asyncio.get_running_loop())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(ready), 0.2)
    sender.report_ready()
    await asyncio.wait_for(ready, 60)
    watcher.close()
    sender.close()
