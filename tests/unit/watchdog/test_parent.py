"""The parent process of a service in a container."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.watchdog import __main__ as watchdog
from shared.watchdog.__main__ import Parent
from shared.watchdog.decision import Limits

MOST_SIGNALS = 200
SILENT = "import time; time.sleep(60)"


def test_orphans_that_end_all_the_time_do_not_hide_a_hung_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 gets a signal for each, and once observed the service only without signals."""
    observations: list[str] = []
    monkeypatch.setattr(watchdog, "OBSERVE_INTERVAL_S", 0.05)
    parent = Parent([sys.executable, "-c", SILENT], Limits(loop_s=1.0, outside_loop_s=1.0), tmp_path)
    received = 0

    def notify(_: set[signal.Signals], within_s: float) -> SimpleNamespace:
        nonlocal received
        received += 1
        if observations or received > MOST_SIGNALS:
            os.kill(parent._pid, signal.SIGKILL)
        time.sleep(within_s / 2)
        return SimpleNamespace(si_signo=signal.SIGCHLD)

    monkeypatch.setattr(signal, "sigtimedwait", notify)
    monkeypatch.setattr(parent, "_observe", lambda: observations.append("observed"))
    try:
        assert parent.run() == 128 + signal.SIGKILL
    finally:
        parent._heartbeats.close()
    assert observations
