"""Pages lent over the loader's socket: killed engines, replaced loaders, loads that need pages."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from services.loader.handlers import Loader
from services.loader.kv_lending import KvLending
from services.loader.local_socket import LocalReaders, listening
from tests.unit.loader.store.test_separate import COUNT, Model, load, made
from weights.kv_lease import KvLease, Lent, Shrink
from weights.pool import shm
from weights.store.lending import Borrower
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

WITHIN_S = 60.0
ENGINE = """
import sys
from pathlib import Path
from weights.kv_lease import KvLease, Lent, Shrink
from weights.pool import shm

held = 0

def deliver(event):
    global held
    if isinstance(event, Lent):
        held += event.more
        print("lent", held, flush=True)
    else:
        print("shrink", event.keep, flush=True)

lease = KvLease(Path(sys.argv[1]), "cpu:1", "i-1", int(sys.argv[2]), deliver)
for line in sys.stdin:
    word, number = line.split()
    if word == "demand":
        lease.demand(int(number))
    else:
        held -= int(number)
        lease.give_back(int(number))
lease.close()
"""


class NoLoads:
    """A loader without loads: its socket only lends."""

    def release_hold(self, holder: str) -> None: ...


class Engine:
    """An engine's process that borrows."""

    def __init__(self, path: Path, floor: int) -> None:
        arguments = [sys.executable, "-c", ENGINE, str(path), str(floor)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def reads(self, *expected: str) -> None:
        """Read lines until one of `expected`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            while (line := (await asyncio.to_thread(self.process.stdout.readline)).strip()) not in expected:
                assert line, "the engine has ended"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
async def device() -> AsyncIterator[SeparateDevice]:
    device = made()
    yield device
    assert device.audit() == []
    device.close()


@pytest.fixture
async def path(device: SeparateDevice, tmp_path: Path) -> AsyncIterator[Path]:
    readers = LocalReaders(cast(Loader, NoLoads()), shm.SHM, "socket", KvLending({"cpu:1": device}))
    async with listening(tmp_path / "loader.sock", readers):
        yield tmp_path / "loader.sock"


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  # /proc and threads notify no event loop
            await asyncio.sleep(0.01)


def lent(device: SeparateDevice) -> int:
    return device.pages().lent_bytes // PAGE_BYTES


async def test_killed_engine_returns_every_page(device: SeparateDevice, path: Path) -> None:
    engine = Engine(path, 2)
    await engine.reads("lent 2")
    engine.say("demand 9")
    await engine.reads("lent 9")
    assert lent(device) == 9
    os.kill(engine.process.pid, signal.SIGKILL)
    await until(lambda: lent(device) == 0)
    engine.kill()


async def test_demand_is_met_when_another_engine_returns_pages(device: SeparateDevice, path: Path) -> None:
    first, second = Engine(path, 1), Engine(path, 1)
    await first.reads("lent 1")
    first.say(f"demand {COUNT - 1}")
    await first.reads(f"lent {COUNT - 1}")
    await second.reads("lent 1")
    second.say("demand 6")
    first.say("demand 3")
    first.say(f"give {COUNT - 4}")
    await second.reads("lent 6")
    assert lent(device) == 9
    first.kill()
    second.kill()
    await until(lambda: lent(device) == 0)


async def test_engine_shrinks_for_a_load(device: SeparateDevice, path: Path) -> None:
    engine = Engine(path, 2)
    await engine.reads("lent 2")
    engine.say(f"demand {COUNT}")
    await engine.reads(f"lent {COUNT}")
    loading = asyncio.create_task(asyncio.to_thread(load, device, Model("a", 1, 2, 3)))
    await engine.reads(f"shrink {COUNT - 4}", f"shrink {COUNT - 3}")
    engine.say("give 4")
    arena = await loading
    assert await asyncio.to_thread(arena.wait, arena.nbytes)
    arena.release()
    engine.kill()
    await until(lambda: lent(device) == 0)


async def test_engine_keeps_its_pages_when_the_loader_is_replaced(tmp_path: Path) -> None:
    """Pages of the earlier loader count against the device until they are unmapped."""
    path = tmp_path / "loader.sock"
    first = made("first")
    async with listening(path, LocalReaders(cast(Loader, NoLoads()), shm.SHM, "a", KvLending({"cpu:1": first}))):
        engine = Engine(path, 5)
        await engine.reads("lent 5")
    first.close()
    second = made("second")
    assert lent(second) == 5
    async with listening(path, LocalReaders(cast(Loader, NoLoads()), shm.SHM, "b", KvLending({"cpu:1": second}))):
        engine.say("demand 7")
        await engine.reads("lent 7")
        assert lent(second) == 7
        engine.say("give 5")  # those of the first loader
        second.lender.open("other", Borrower(0))
        await until(lambda: second.lender.lend("other", COUNT - 2) and len(second.store().free) == 0)
        second.lender.take_back("other")
        engine.kill()
        await until(lambda: lent(second) == 0)
    assert second.audit() == []
    second.close()


async def test_lease_in_this_process_closes_without_a_loader(tmp_path: Path) -> None:
    events: queue.SimpleQueue[Lent | Shrink] = queue.SimpleQueue()
    lease = KvLease(tmp_path / "none.sock", "cpu:1", "i", 1, events.put)
    lease.demand(3)
    lease.close()
    assert (lease.held, events.empty()) == (0, True)
