"""The meters of a killed engine are those of its last step, not those of its last report."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.engines.charge_page import ChargePage, read_charges
from shared.engines.final_charges import FinalCharges


def test_meters_of_a_killed_process_are_read(tmp_path: Path) -> None:
    path = tmp_path / "i.charges"
    pid = os.fork()
    if pid == 0:
        page = ChargePage(path)
        page.write_steps(3.0, 2.5, 0.25)
        page.write_unmetered(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_charges(path, pid) == FinalCharges(3.0, 2.0, 0.75)
    assert read_charges(path, pid + 1) is None, "of another process"
    ChargePage(path)
    assert read_charges(path, os.getpid()) == FinalCharges(0.0, 0.0, 0.0), "the next process begins at 0"
    path.write_bytes(b"short")
    assert (read_charges(path, pid), read_charges(tmp_path / "missing", pid)) == (None, None)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_last_report_gets_the_last_meters() -> None:
    last = EngineLoad(
        completed=4, busy_s=2.0, charged_s=1.0, background=(BackgroundWork(seconds=0.1), BackgroundWork(plan_id="p", seconds=0.2))
    )
    assert FinalCharges(3.0, 2.25, 0.5).apply_to(last) == EngineLoad(
        completed=4, busy_s=3.0, charged_s=2.25, background=(BackgroundWork(plan_id="p", seconds=0.2), BackgroundWork(seconds=0.5))
    )
