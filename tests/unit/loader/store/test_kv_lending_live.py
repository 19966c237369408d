"""Pages lent over the loader's socket: killed engines, replaced loaders, loads that need pages."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from services.loader.handlers import Loader
from services.loader.kv_lending import KvLending
from services.loader.local_socket import LocalReaders, listening
from shared.contracts.loader_socket import SocketBorrow, SocketError
from tests.unit.loader.store.borrowing_engine import WITHIN_S, Engine, NoLoads
from tests.unit.loader.store.gpu import Gpus
from tests.unit.loader.store.separate_devices import COUNT, Model, load, made
from weights import kv_lease
from weights.kv_lease import KvLease, Lent, Shrink
from weights.pool import shm
from weights.store.lending import Borrower
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES


@pytest.fixture(params=["cpu", "gpu"])
async def device(request: pytest.FixtureRequest) -> AsyncIterator[SeparateDevice]:
    if request.param == "cpu":
        device = made()
        yield device
        assert device.audit() == []
        device.close()
    else:
        gpus = Gpus(COUNT, lends_kv=True)
        device = gpus.get("cuda:0")
        yield device
        assert device.audit() == []
        gpus.close()


@pytest.fixture
async def path(device: SeparateDevice, tmp_path: Path) -> AsyncIterator[Path]:
    readers = LocalReaders(cast(Loader, NoLoads()), shm.SHM, "socket", KvLending(lambda: {device.device_id: device}))
    async with listening(tmp_path / "loader.sock", readers):
        yield tmp_path / "loader.sock"


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110  # /proc and threads notify no event loop
            await asyncio.sleep(0.01)


def lent(device: SeparateDevice) -> int:
    return device.pages().lent_bytes // PAGE_BYTES


async def test_killed_engine_returns_every_page(device: SeparateDevice, path: Path) -> None:
    engine = Engine(path, 2, device.device_id, device.bus_id)
    await engine.reads("lent 2")
    engine.say("demand 9")
    await engine.reads("lent 9")
    assert lent(device) == 9
    os.kill(engine.process.pid, signal.SIGKILL)
    await until(lambda: lent(device) == 0)
    engine.kill()


async def test_an_engine_returns_its_pages_after_the_loader_failed_to_lend_more(
    device: SeparateDevice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failed = Engine(path, 2, device.device_id, device.bus_id), asyncio.Event()
    await engine.reads("lent 2")
    loop = asyncio.get_running_loop()

    def fail(pages: object) -> int:
        loop.call_soon_threadsafe(failed.set)
        raise OSError(errno.EBUSY, "memory was touched while it was given back")

    with monkeypatch.context() as patch:
        patch.setattr(device.memory, "free", fail)
        engine.say("demand 4")
        async with asyncio.timeout(WITHIN_S):
            await failed.wait()
    engine.say("demand 5")
    await engine.reads("lent 5")
    engine.kill()
    await until(lambda: lent(device) == 0)


async def test_demand_is_met_when_another_engine_returns_pages(device: SeparateDevice, path: Path) -> None:
    first, second = Engine(path, 1, device.device_id, device.bus_id), Engine(path, 1, device.device_id, device.bus_id)
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
    engine = Engine(path, 2, device.device_id, device.bus_id)
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
    async with listening(path, LocalReaders(cast(Loader, NoLoads()), shm.SHM, "a", KvLending(lambda: {"cpu:1": first}))):
        engine = Engine(path, 5, first.device_id, first.bus_id)
        await engine.reads("lent 5")
    first.close()
    second = made("second")
    assert lent(second) == 5
    async with listening(path, LocalReaders(cast(Loader, NoLoads()), shm.SHM, "b", KvLending(lambda: {"cpu:1": second}))):
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


class Full:
    """Memory of a GPU that others have filled, but for `left` pages."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.asked = 0

    def add(self, pages: int) -> int:
        self.asked += pages
        made = min(pages, self.left)
        self.left -= made
        return made


@pytest.mark.parametrize("device", ["gpu"], indirect=True)
@pytest.mark.parametrize("again_s", [0.01, 3600.0])
async def test_pages_without_memory_are_returned_and_asked_for_again(
    device: SeparateDevice, path: Path, again_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, not at once: the lender would lend the same pages, and again."""
    monkeypatch.setattr(kv_lease, "_REFUSED_S", again_s)
    memory, events = Full(3), queue.SimpleQueue[Lent | Shrink]()
    lease = KvLease(path, device.device_id, "i", 1, events.put, ceiling_pages=COUNT, memory=memory)
    lease.demand(5)
    await until(lambda: lease.held == 3 and lent(device) == 3)
    memory.left = 2
    if again_s > WITHIN_S:
        assert memory.asked == 5
        lease.demand(5)
    await until(lambda: lease.held == 5 and lent(device) == 5)
    assert memory.asked == 7 or again_s < WITHIN_S
    found = []
    while not events.empty():
        found.append(events.get())
    assert sum(e.more for e in found if isinstance(e, Lent)) == 5
    lease.close()
    assert lent(device) == 5, "until this process has exited"
    device.lender.take_back("socket-1", device.store().lent["socket-1"])


async def test_a_gpu_that_lends_nothing_refuses_borrowers(tmp_path: Path) -> None:
    gpus = Gpus(COUNT)
    device, path = gpus.get("cuda:0"), tmp_path / "loader.sock"
    readers = LocalReaders(cast(Loader, NoLoads()), shm.SHM, "socket", KvLending(lambda: {"cuda:0": device}))
    async with listening(path, readers):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(SocketBorrow(device="cuda:0", instance_id="i", floor_pages=1).model_dump_json().encode() + b"\n")
        answer = SocketError.model_validate_json(await reader.readline())
        writer.close()
    assert (answer.error.code, "THAW_CUDA_LEND_KV" in answer.error.message) == ("not_found", True)
    assert not device.pages().is_lending
    gpus.close()
