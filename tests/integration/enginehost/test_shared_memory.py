"""The host's reaper removes an engine's /dev/shm files, even after SIGKILL.

It leaves those of others alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from services.enginehost.runtimes import reaper
from shared.contracts.engine import EngineReport
from tests.support.hosted import Hosts, fake_card
from tests.support.launcher import until

ENGINE = """
import json, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
own, foreign = SharedMemory(create=True, size=4096), SharedMemory(name=sys.argv[1])
# Else Python's tracker would remove it, if it outlives this process for a moment.
resource_tracker.unregister("/" + foreign.name, "shared_memory")
print(json.dumps(own.name), flush=True)
time.sleep(600)
"""


@pytest.fixture
def of_another() -> Iterator[SharedMemory]:
    """Yield a segment of a process that keeps running."""
    memory = SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    memory.unlink()


def test_shared_memory_of_a_killed_engine_is_removed_and_that_of_others_kept(of_another: SharedMemory) -> None:
    token = secrets.token_hex(8)
    reading, writing = os.pipe()
    argv = [sys.executable, "-IS", reaper.__file__, f"{reaper.VARIABLE}={token}", ""]
    subprocess.run(argv, stdin=reading, start_new_session=True, check=True, timeout=60)
    os.close(reading)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, of_another.name],
        env={**os.environ, reaper.VARIABLE: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with engine:
        assert engine.stdout is not None
        own = Path("/dev/shm") / json.loads(engine.stdout.readline())
        assert own.exists()
        os.write(writing, f"{engine.pid} {reaper.read_start_time(engine.pid)}".encode())
        os.close(writing)  # the end of the host
        assert engine.wait(60) == -9
    assert reaper.find_shared_memory(os.getpid()), "this test has a segment of its own mapped"
    until(lambda: not own.exists(), what="the reaper has removed it")
    assert (Path("/dev/shm") / of_another.name).exists()


async def sharing(hosts: Hosts) -> tuple[EngineReport, list[Path]]:
    """Yield a ready engine, and its shared memory and semaphore."""
    start = hosts.host(fake_card("--share"))
    report = await hosts.settled(start.instance_id)
    assert report.state == "ready", report.error
    own = [Path("/dev/shm") / name for name in Path(start.log_path).read_text().partition("shared: ")[2].split()[:2]]
    assert all(path.exists() for path in own)
    return report, own


async def gone(hosts: Hosts, own: list[Path]) -> None:
    await hosts.eventually(lambda: asyncio.to_thread(lambda: [p for p in own if p.exists()]), lambda there: not there)


async def test_clean_engine_exit_leaves_no_shared_memory(hosts: Hosts) -> None:
    report, own = await sharing(hosts)
    os.kill(report.pid, signal.SIGTERM)
    await gone(hosts, own)


async def test_killed_engine_and_host_leave_no_shared_memory(hosts: Hosts) -> None:
    """No shared memory remains if engine and host are killed together.

    A nodeagent does that with frozen processes: none is left to report its segments.
    """
    report, own = await sharing(hosts)
    assert report.hosted is not None
    for pid in (*report.hosted.pids, report.pid):
        os.kill(pid, signal.SIGKILL)
    await gone(hosts, own)
