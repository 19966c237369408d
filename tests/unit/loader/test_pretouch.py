"""Touching the host's memory once after boot: when, how much, and who ends it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.loader.adapters import pretouching
from services.loader.adapters.pretouching import Pretouching
from services.loader.domain import pretouch
from services.loader.domain.pretouch import AFTER_PRESSURE_S, IDLE_BEFORE_S, Mode, Pretouch
from weights.pool.host_backing import Host, host, memory_pressure
from weights.pool.pretouch import FREE_SHARE, RESERVED_SHARE, STEP_BYTES, Memory, judge, touch

GIB = 1 << 30
SERVER = Host(is_virtual=True, takes_back=False, is_desktop=False, boot_id="b")


@pytest.mark.parametrize(
    ("mode", "machine", "done", "touched"),
    [
        ("auto", SERVER, "", True),
        ("auto", SERVER, "an earlier boot", True),
        ("auto", SERVER, "b", False),
        ("auto", Host(False, False, False, "b"), "", False),
        ("auto", Host(True, True, False, "b"), "", False),
        ("auto", Host(True, False, True, "b"), "", False),
        ("on", Host(False, True, True, "b"), "", True),
        ("on", SERVER, "b", False),
        ("off", SERVER, "", False),
    ],
)
def test_memory_is_touched_where_it_helps(mode: Mode, machine: Host, done: str, touched: bool) -> None:
    reason = pretouch.reason_to_skip(mode, machine, done)
    assert (reason is None) == touched
    assert (pretouch.begin(reason).state == "waiting") == touched


def test_touching_waits_for_idleness_and_after_pressure() -> None:
    began = pretouch.begin(None)
    assert pretouch.wait_s(began, 100.0, 98.0) == IDLE_BEFORE_S - 2
    assert pretouch.wait_s(began, 100.0, 0.0) == 0
    stopped = pretouch.record_end(pretouch.record_progress(began, GIB, "pressure", 100.0), 101.0)
    assert pretouch.wait_s(stopped, 101.0, 0.0) == AFTER_PRESSURE_S - 1
    assert stopped.touched_bytes == 0


def test_a_load_that_ends_the_process_postpones_it() -> None:
    running = pretouch.record_progress(Pretouch(), GIB, "continue", 100.0)
    assert running.state == "running"
    assert pretouch.wait_s(pretouch.record_end(running, 101.0), 101.0, 101.0) == IDLE_BEFORE_S
    complete = pretouch.record_progress(running, 2 * GIB, "complete", 102.0)
    assert pretouch.wait_s(pretouch.record_end(complete, 103.0), 103.0, 0.0) is None


@given(st.integers(0, 64 * GIB), st.integers(0, 64 * GIB), st.none() | st.floats(0, 100))
def test_memory_of_others_is_left_alone(available: int, free: int, pressure: float | None) -> None:
    memory = Memory(64 * GIB, available, free, pressure)
    if judge(memory) == "continue":
        assert available - STEP_BYTES >= memory.total * RESERVED_SHARE
        assert free - STEP_BYTES >= memory.total * FREE_SHARE
        assert pressure is None or pressure <= 5
    elif judge(memory) == "pressure":
        assert pressure is not None


def test_touching_stops_at_its_bound_and_under_pressure() -> None:
    plenty = Memory(8 * GIB, 8 * GIB, 8 * GIB)
    assert list(touch(lambda: plenty, 2 * STEP_BYTES))[-1] == (2 * STEP_BYTES, "complete")
    readings = iter([plenty, plenty, Memory(8 * GIB, 8 * GIB, 8 * GIB, pressure=20.0)])
    assert list(touch(lambda: next(readings))) == [(STEP_BYTES, "continue"), (2 * STEP_BYTES, "pressure")]
    assert list(touch(lambda: Memory(8 * GIB, 0, 0))) == [(0, "complete")]


def test_hosts_that_take_memory_back_are_recognised(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/virtio/devices/virtio0"
    device.mkdir(parents=True)
    (device / "device").write_text("0x0005\n")
    (device / "features").write_text("0110000" + "0" * 57)
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nflags : fpu hypervisor lahf_lm\n")
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.6.1-linuxkit\n")
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("b\n")
    (tmp_path / "proc/pressure/memory").write_text("some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 total=0\n")
    assert host(tmp_path / "sys", tmp_path / "proc") == Host(True, False, True, "b")
    (device / "features").write_text("0110010" + "0" * 57)
    assert host(tmp_path / "sys", tmp_path / "proc").takes_back
    assert memory_pressure(tmp_path / "proc") == 1.5
    assert memory_pressure(tmp_path) is None
    assert host(tmp_path, tmp_path) == Host(False, False, False, "")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_the_process_runs_to_its_end_once_per_boot(tmp_path: Path) -> None:
    memory = Pretouching("auto", SERVER, tmp_path / "marker")
    # At idle priority it would make no progress beside other tests, which may also use the memory.
    script = (
        "import weights.pool.pretouch as p; p._step_back = lambda: None; p.judge = lambda *_: 'continue'; "
        f"p.main([{str(tmp_path / 'marker')!r}, '{STEP_BYTES}'])"
    )
    memory.command = (sys.executable, "-c", script)
    changes: list[str] = []
    await asyncio.wait_for(memory.run(lambda: 0.0, lambda: changes.append(memory.progress.state)), 60)
    assert memory.progress == Pretouch("complete", STEP_BYTES)
    assert changes[-1] == "complete"
    machine = host()
    assert (tmp_path / "marker").read_text() == machine.boot_id
    again = Pretouching("on", machine, tmp_path / "marker")
    assert again.progress.state == "skipped"


async def test_a_load_ends_the_process_and_waits_for_its_memory(tmp_path: Path) -> None:
    memory = Pretouching("auto", SERVER, tmp_path / "marker")
    steps = 'import time\nprint(\'{"touched_bytes": 1, "verdict": "continue"}\', flush=True)\ntime.sleep(60)'
    memory.command = (sys.executable, "-c", steps)
    busy_at = [0.0]
    task = asyncio.create_task(memory.run(lambda: busy_at[0], lambda: None))
    await until(lambda: memory.progress.state == "running")
    busy_at[0] = time.monotonic()
    await asyncio.to_thread(memory.give_back)
    assert memory._process is None
    await until(lambda: memory.progress.state == "waiting")
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stalled_process_holds_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretouching, "_STALLED_S", 0.05)
    memory = Pretouching("on", SERVER, tmp_path / "marker")
    memory.command = (sys.executable, "-c", "import time; time.sleep(60)")
    task = asyncio.create_task(memory.run(lambda: 0.0, lambda: None))
    await until(lambda: memory.progress.not_before > 0)
    assert memory.progress.state == "waiting"
    assert memory._process is None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_shutdown_leaves_no_process(tmp_path: Path) -> None:
    memory = Pretouching("on", SERVER, tmp_path / "marker")
    memory.command = (
        sys.executable,
        "-c",
        'print(\'{"touched_bytes": 1, "verdict": "continue"}\', flush=True)\nimport time\ntime.sleep(60)',
    )
    task = asyncio.create_task(memory.run(lambda: 0.0, lambda: None))
    await until(lambda: memory.progress.state == "running")
    process = memory._process
    assert process is not None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(process.wait(), 60) < 0


async def test_a_process_that_cannot_start_is_tried_again_later(tmp_path: Path) -> None:
    memory = Pretouching("on", SERVER, tmp_path / "marker")
    memory.command = (str(tmp_path / "missing"),)
    task = asyncio.create_task(memory.run(lambda: 0.0, lambda: None))
    await until(lambda: memory.progress.not_before > 0)
    assert memory.progress.state == "waiting"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
