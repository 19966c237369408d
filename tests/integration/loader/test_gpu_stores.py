"""Loads onto GPUs that keep units, over real NATS and with engines' processes.

The driver is the stand-in; the loader is wired as on a node with two GPUs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from services.loader import app
from shared.contracts import subjects
from shared.contracts.loader import WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, NodeStatus
from shared.contracts.segment import GpuUnitsHandle
from tests.integration.loader.separate import SeparateLoader, separate_loader, write_model
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.support.servers import NatsServer
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.loader.store.borrowing_engine import Engine as Borrower
from tests.unit.loader.store.units_bench import Engine
from weights.client import audit_memory
from weights.store.gpu_device import gpu_devices
from weights.store.units import PAGE_BYTES

TENSORS = 10
NODE = "n-gpus"
GPU_BYTES = 32 * PAGE_BYTES


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Give the loader two GPUs, which keep all units of instances that have ended."""
    memory = FakeVirtualMemory(GPU_BYTES, devices=2)
    driver = FakeDriver(2, memory, total_bytes=GPU_BYTES)
    monkeypatch.setattr(app, "has_driver", lambda: True)
    monkeypatch.setattr(app, "load_driver", lambda: driver)
    monkeypatch.setattr(app, "group_bytes", lambda *_, cache: PAGE_BYTES)
    monkeypatch.setattr(app, "gpu_devices", partial(gpu_devices, load=lambda: memory))
    monkeypatch.setenv("THAW_CUDA_REUSE_BYTES", str(GPU_BYTES))
    yield driver
    assert (memory.handles, memory.mappings, memory.reservations) == ({}, {}, {})
    assert (driver.streams, driver.events, driver.pinned) == ([], 0, {})


async def attach(loader: SeparateLoader, instance: str, card: ModelCard, device: str) -> WeightsAttached:
    """Attach weights on a GPU, as soon as the loader knows that engines may map them."""
    capabilities = (Capability(name=WEIGHTS_ON_GPU, available=True),)
    status = NodeStatus(node=NODE, boot_id="b", seq=1, devices=(), capabilities=capabilities)
    async with asyncio.timeout(60):
        while True:
            await loader.mesh.publish(subjects.node_status(NODE), status)
            found = await loader.attach(instance, card, device)
            assert found.device_error is None, found.device_error
            if isinstance(found.handle, GpuUnitsHandle):
                return found
            await loader.client.release(instance)


async def read(home: Path, instance: str, found: WeightsAttached) -> list[str]:
    """Return the hashes of the units as a process of the instance maps them."""
    engine = Engine(loader_socket(home / "nodes" / NODE), instance, found)
    seen = await engine.seen()
    await engine.kill()
    return seen


async def test_gpus_load_what_they_lack_and_copy_it_from_each_other(
    nats_server: NatsServer, tmp_path: Path, driver: FakeDriver
) -> None:
    base, tuned = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "tuned", range(2, TENSORS + 2))
    home = tmp_path / "home"
    async with separate_loader(nats_server, home, "cuda:0=60MiB,cuda:1=60MiB", NODE) as loader:
        client = loader.client
        first = await read(home, "a", await attach(loader, "a", await client.card(base), "cuda:0"))
        before = await loader.until_copied(TENSORS, read=TENSORS)
        assert [(m.device_id, m.is_lending) for m in before.memory] == [("cuda:0", False)], "the other GPU is not open"
        card = await client.card(tuned)
        second = await read(home, "b", await attach(loader, "b", card, "cuda:0"))
        assert (len(first), second[: TENSORS - 2]) == (TENSORS, first[2:])
        both = await loader.until_copied(TENSORS + 2, read=TENSORS + 2)
        assert both.memory[0].mapped_bytes == (TENSORS + 2) * PAGE_BYTES, "units in common are there once"
        assert 2 * PAGE_BYTES <= both.read_bytes - before.read_bytes < 3 * PAGE_BYTES
        assert await read(home, "c", await attach(loader, "c", card, "cuda:1")) == second
        last = await loader.until_copied(TENSORS + 2, TENSORS)
        assert last.memory[1].peer_bytes > TENSORS // 2 * PAGE_BYTES
        assert last.read_bytes - both.read_bytes < TENSORS // 2 * PAGE_BYTES, "the other GPU has all of it"
        assert {(source, target, is_direct) for source, target, _, is_direct in driver.peer_copies} == {(0, 1, True)}
        assert any(link.link == "p2p:cuda:0>cuda:1" and link.bytes_per_second for link in last.links)
        for instance in "abc":
            await client.release(instance)
        after = await loader.until_unmapped()
        assert [m.reusable_bytes // PAGE_BYTES for m in after.memory] == [TENSORS + 2, TENSORS]
        audited = await asyncio.to_thread(audit_memory, loader_socket(home / "nodes" / NODE), 60.0)
        assert [(d.device_id, d.violations) for d in audited] == [("cuda:0", ()), ("cuda:1", ())]


async def test_a_gpu_lends_pages_from_its_first_load_on(
    nats_server: NatsServer, tmp_path: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THAW_CUDA_LEND_KV", "true")
    source, home = write_model(tmp_path / "base", range(TENSORS)), tmp_path / "home"
    async with separate_loader(nats_server, home, "cuda:0=60MiB", NODE) as loader:
        found = await attach(loader, "a", await loader.client.card(source), "cuda:0")
        assert isinstance(found.handle, GpuUnitsHandle)
        assert found.handle.lends_kv
        socket = loader_socket(home / "nodes" / NODE)
        engine = Borrower(socket, 2, "cuda:0", found.handle.bus_id)
        await engine.reads("lent 2")
        engine.say("demand 5")
        await engine.reads("lent 5")
        status = await loader.until(lambda s: s.memory[0].lent_bytes == 5 * PAGE_BYTES)
        [kv] = status.memory[0].kv
        assert (kv.floor_bytes, kv.wanted_bytes, status.memory[0].is_lending) == (2 * PAGE_BYTES, 5 * PAGE_BYTES, True)
        engine.say("demand 3")
        engine.say("give 2")
        await loader.until(lambda s: s.memory[0].lent_bytes == 3 * PAGE_BYTES)
        audited = await asyncio.to_thread(audit_memory, socket, 60.0)
        assert [d.violations for d in audited] == [()]
        engine.kill()
        await loader.until(lambda s: s.memory[0].lent_bytes == 0)


async def test_likelihoods_reach_a_gpu_that_is_opened_later(nats_server: NatsServer, tmp_path: Path, driver: FakeDriver) -> None:
    base, other = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "other", range(20, 20 + TENSORS))
    large = write_model(tmp_path / "large", range(40, 40 + 20))
    async with separate_loader(nats_server, tmp_path / "home", "cuda:0=60MiB", NODE) as loader:
        client = loader.client
        cards = [await client.card(source, source.parent.name) for source in (base, other, large)]
        await loader.expect(cards[0])
        for n, card in enumerate(cards):
            await attach(loader, f"i{n}", card, "cuda:0")
            await client.release(f"i{n}")
        found = await loader.until(lambda s: bool(s.memory) and s.memory[0].copied_bytes == 40 * PAGE_BYTES)
        left = {w.weights_id: w.total_bytes - w.missing_bytes for w in found.memory[0].weights}
        assert left[cards[0].info.revision] == TENSORS * PAGE_BYTES, "the expected model stays, though it was used first"
        assert left[cards[1].info.revision] == (32 - 20 - TENSORS) * PAGE_BYTES
