"""The migration benchmark: rate, pause, and nodes limited to cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from bench.cores import pin, unpin
from bench.migration_streams import rate
from bench.moving import Timed, paused_ms
from bench.report import write


def stream(*times: float) -> Timed:
    made = Timed("http://nowhere", {})
    made.tokens, made.at = [""] * len(times), list(times)
    return made


def test_rate_counts_fractions_of_tokens_at_its_ends() -> None:
    steady = stream(*(i / 10 for i in range(100)))
    assert rate([steady], 2.0, 4.0) == pytest.approx(10.0)
    assert rate([steady], 2.03, 2.09) == pytest.approx(10.0)
    assert rate([steady, steady], 2.0, 4.0) == pytest.approx(20.0)
    stalled = stream(*(i / 10 for i in range(30)), *(5 + i / 10 for i in range(30)))
    assert rate([stalled], 2.0, 6.0) == pytest.approx(5.0, rel=0.05)


def test_a_pause_is_the_longest_gap_above_the_median() -> None:
    gaps = Timed("http://nowhere", {}, gaps=[0.5, 0.01, 0.01, 0.05, 0.01])
    assert paused_ms(gaps, 1) == pytest.approx(40.0)


def test_processes_are_pinned_to_the_cores_of_their_node() -> None:
    cores = sorted(os.sched_getaffinity(0))
    first, last = {cores[0]}, {cores[-1]}
    # Popen returns before the kernel shows the new environment: it is there once the program runs.
    command, environment = [sys.executable, "-c", "input(print(flush=True) or '')"], {**os.environ, "THAW_NODE": "node-0"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert child.stdout is not None
    child.stdout.readline()
    waits = threading.Event()
    thread = threading.Thread(target=waits.wait)
    thread.start()
    try:
        pin([psutil.Process(child.pid)], {"node-0": first}, last)
        assert os.sched_getaffinity(child.pid) == first
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == last
        unpin()
        assert os.sched_getaffinity(0) == set(cores)
    finally:
        waits.set()
        thread.join()
        child.communicate(b"\n")


def test_figures_of_several_runs_are_kept_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["migration.py", "--parts", "pause"])
    write(path, {"a": 1.0})
    monkeypatch.setattr(sys, "argv", ["migration.py", "--parts", "policies"])
    write(path, {"b": 2.0}, add=True)
    written = json.loads(path.read_text())
    assert written["figures"] == {"a": 1.0, "b": 2.0}
    assert len(written["commands"]) == 2
    write(path, {"c": 3.0})
    assert json.loads(path.read_text())["figures"] == {"c": 3.0}
