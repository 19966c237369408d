"""Readings of real processes: identity, exits, memory, and the cause of death."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.nodeagent.devices.cpu import CpuDevice, available_bytes, oom_kills, private_pss, private_rss
from services.nodeagent.engines.exits import explain_exit, prune_logs
from services.nodeagent.engines.process import Processes, find_log_writer, process_start
from shared.enginelog import log_tail
from tests.support.stopping import killed_at_exit

MIB = 1024 * 1024


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds 64 MiB, with `log` as standard error.

    It prints a line once it holds them.
    """
    code = "import sys; held = bytearray(b'x') * (64 << 20); print('held', flush=True); sys.stdin.read()"
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


async def test_process_exit_is_reported_with_its_instance(sleeper: subprocess.Popen[bytes]) -> None:
    ends: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    processes = Processes(lambda instance, pid: ends.put_nowait((instance, pid)))
    assert processes.watch("i", sleeper.pid) == process_start(sleeper.pid)
    processes.send("i", "term")
    assert await asyncio.wait_for(ends.get(), 60) == ("i", sleeper.pid)
    assert process_start(sleeper.pid) is None  # a zombie until the test waits for it
    processes.send("i", "kill")  # gone: no bytes
    processes.close()


async def test_process_that_has_exited_is_not_handed_over(sleeper: subprocess.Popen[bytes]) -> None:
    ends: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    processes = Processes(lambda instance, pid: ends.put_nowait((instance, pid)))
    processes.watch("old", sleeper.pid)
    assert processes.hand_over("old", "new")
    processes.send("new", "kill")
    assert await asyncio.wait_for(ends.get(), 60) == ("new", sleeper.pid)
    assert not processes.hand_over("new", "newest")


async def test_reused_pid_is_not_watched(sleeper: subprocess.Popen[bytes]) -> None:
    processes = Processes(lambda *_: None)
    started = process_start(sleeper.pid)
    assert started is not None
    assert processes.watch("i", sleeper.pid, started - 1) is None
    assert processes.watch("i", sleeper.pid, started) == started
    processes.close()
    sleeper.kill()
    sleeper.wait()
    assert processes.watch("i", sleeper.pid, started) is None


def test_process_is_found_by_its_log(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert find_log_writer(tmp_path / "log") == sleeper.pid
    assert find_log_writer(tmp_path / "other") is None


def test_private_memory_of_a_process_is_measured(sleeper: subprocess.Popen[bytes]) -> None:
    device = CpuDevice(1)
    measured = device.private_bytes([sleeper.pid])[sleeper.pid]
    assert 64 * MIB <= measured <= 128 * MIB
    assert private_pss(sleeper.pid) == pytest.approx(measured, rel=0.1)
    resident = private_rss(sleeper.pid)
    assert resident is not None
    assert resident >= 64 * MIB
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert device.private_bytes([sleeper.pid]) == {}  # a zombie holds no memory
    assert private_rss(sleeper.pid) is None


def test_shared_memory_is_not_private(tmp_path: Path) -> None:
    segment = Path(f"/dev/shm/thaw-test-{os.getpid()}")
    segment.write_bytes(bytes(32 * MIB))
    code = (
        f"import mmap, sys; f = open('{segment}', 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); "
        "s = sum(m[i] for i in range(0, len(m), 4096)); print('held', flush=True); sys.stdin.read()"
    )
    try:
        with killed_at_exit(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)) as child:
            assert child.stdout is not None
            child.stdout.readline()
            measured = private_pss(child.pid)
            child.kill()
    finally:
        segment.unlink()
    assert measured is not None
    assert measured < 24 * MIB


def test_available_memory_and_oom_counter_can_be_read() -> None:
    assert available_bytes() > 0
    counter = oom_kills()
    assert counter is None or counter >= 0


def test_exit_error_states_only_observed_causes(tmp_path: Path) -> None:
    log = tmp_path / "x.engine.log"
    log.write_text("\n".join(f"line {n}" for n in range(100)))
    assert "exit status 3" in explain_exit(5, 3, (1, 2), log).message
    assert "memory" not in explain_exit(5, 3, (1, 2), log).message
    assert "memory" not in explain_exit(5, -signal.SIGKILL, (1, 1), log).message
    assert "possibly out of memory" in explain_exit(5, -signal.SIGKILL, (1, 2), log).message
    assert "possibly out of memory" in explain_exit(5, None, (1, 2), log).message
    assert "memory" not in explain_exit(5, -signal.SIGKILL, (None, 2), log).message
    assert explain_exit(5, None, (None, None), log).message.endswith("line 98\nline 99")
    codes = [explain_exit(5, *how, log).code for how in ((3, (1, 1)), (-signal.SIGSEGV, (1, 1)), (-signal.SIGKILL, (1, 2)))]
    assert codes == ["engine_failed"] * 3, "by itself, or for want of memory"
    assert explain_exit(5, -signal.SIGKILL, (1, 1), log).code == explain_exit(5, None, (None, None), log).code == "engine_killed"
    assert len(log_tail(log).splitlines()) == 8
    assert "`thaw logs none`" in explain_exit(5, 0, (None, None), tmp_path / "none.engine.log").message


def test_clients_receive_only_error_lines_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "i-1.engine.log"
    records = [
        {"level": "info", "message": "listening", "host": "10.0.0.7"},
        {"level": "error", "message": "the start failed", "error": "a tensor is missing"},
        {"level": "warning", "message": "NATS error"},
    ]
    log.write_text("\n".join(json.dumps(r) for r in records) + "\nFatal Python error: Aborted\n")
    assert log_tail(log) == "the start failed\na tensor is missing\nFatal Python error: Aborted"


def test_end_of_a_log_leaves_out_the_output_of_earlier_starts(tmp_path: Path) -> None:
    log = tmp_path / "i-1.engine.log"
    log.write_text("address already in use\n")
    begins_at = log.stat().st_size
    with log.open("a") as file:
        file.write("no checkpoint found\n")
    assert log_tail(log, begins_at) == "no checkpoint found"
    log.write_text("x\n")  # rotated
    assert log_tail(log, begins_at) == "x"


def test_oldest_logs_are_deleted_except_those_in_use(tmp_path: Path) -> None:
    for n in range(6):
        path = tmp_path / f"i{n}.engine.log"
        path.touch()
        os.utime(path, (n, n))
        path.with_name(f"{path.name}.1").touch()
    prune_logs(tmp_path, 2, frozenset({"i0"}))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"i{n}.engine.log{aside}" for n in (0, 4, 5) for aside in ("", ".1")]


def test_log_that_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        (tmp_path / f"i{n}.engine.log").touch()

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as changed:
        changed.setattr(Path, "unlink", refuse)
        prune_logs(tmp_path, 2, frozenset())
    assert len(list(tmp_path.iterdir())) == 3


def test_log_that_links_to_a_removed_one_is_the_oldest(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / f"i{n}.engine.log").touch()
    (tmp_path / "gone.engine.log").symlink_to("removed.executor.log")
    prune_logs(tmp_path, 2, frozenset())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i0.engine.log", "i1.engine.log"]
