"""The loader process with two separate cpu devices, over real NATS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from pydantic import SecretStr

from services.loader import app
from services.loader.settings import LoaderSettings
from shared.contracts import subjects
from shared.contracts.loader import AttachWeights, LoaderStatus, WeightsAttached
from shared.contracts.models import ModelCard
from shared.contracts.segment import PagesHandle
from shared.mapping import map_extents
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.integration.loader.conftest import Client
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import write_checkpoint
from weights.convert.job import convert
from weights.pool.shm import SHM
from weights.store.probe import SIZES
from weights.store.units import PAGE_BYTES

NODE = "n-separate"
TENSORS = 10


def write_model(directory: Path, seeds: range) -> Path:
    weights = {f"t{i}": np.random.default_rng(seed).random(PAGE_BYTES // 4, dtype=np.float32) for i, seed in enumerate(seeds)}
    write_checkpoint(directory / "original", weights)
    convert(directory / "original", directory / "converted")
    return directory / "converted"


def read(found: WeightsAttached) -> bytes:
    assert isinstance(found.handle, PagesHandle), found.device_error
    mapped = map_extents(SHM / found.handle.file, found.handle.extents)
    try:
        return bytes(mapped)
    finally:
        mapped.close()


class Watched:
    """The latest status of the loader."""

    def __init__(self) -> None:
        self.changed = asyncio.Condition()
        self.status: LoaderStatus | None = None

    async def hear(self, status: LoaderStatus) -> None:
        async with self.changed:
            self.status = status
            self.changed.notify_all()

    async def until_copied(self, *units: int) -> LoaderStatus:
        """Wait until the devices have had so many units copied to them."""

        def found() -> bool:
            return self.status is not None and [d.copied_bytes // PAGE_BYTES for d in self.status.memory] == list(units)

        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(found)
        assert self.status is not None
        return self.status


async def test_a_fine_tune_reads_what_no_device_has(nats_server: NatsServer, tmp_path: Path) -> None:
    base, tuned = write_model(tmp_path / "base", range(TENSORS)), write_model(tmp_path / "tuned", range(2, TENSORS + 2))
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats_server.url)), "test")
    await mesh.start()
    watched = Watched()
    await mesh.listen(subjects.loader_status(NODE), LoaderStatus, watched.hear).start()
    (tmp_path / "home").mkdir()
    settings = LoaderSettings(
        nats_url=SecretStr(nats_server.url),
        home=tmp_path / "home",
        node=NODE,
        dram_bytes=0,
        cache_bytes=0,
        peer_host="",
        verify=True,
        devices="cpu:0=1GiB,cpu:1=64MiB/separate@50GiB/s,cpu:2=64MiB/separate@cpu:1=50GiB/s",
    )
    stop = asyncio.Event()
    running = asyncio.create_task(app.run(settings, stop))
    client = Client(mesh, NODE)
    await client.until_served()

    async def attach(instance: str, card: ModelCard, device: str) -> WeightsAttached:
        ask = AttachWeights(instance_id=instance, card=card, until="complete", device=device, deadline_ms=60_000)
        return await mesh.request(subjects.loader_command(NODE), ask, WeightsAttached)

    first = read(await attach("a", await client.card(base), "cpu:1"))
    before = await watched.until_copied(TENSORS, 0)
    assert [d.paced_bytes_per_second for d in before.memory] == [50.0 * 2**30, None]
    assert all(link.group_bytes in SIZES for link in before.links if link.link.startswith("bus:"))
    second = read(await attach("b", await client.card(tuned), "cpu:1"))
    both = await watched.until_copied(TENSORS + 2, 0)
    assert second[: 8 * PAGE_BYTES] == first[2 * PAGE_BYTES :]
    assert both.memory[0].mapped_bytes == (TENSORS + 2) * PAGE_BYTES
    assert 2 * PAGE_BYTES <= both.read_bytes - before.read_bytes < 3 * PAGE_BYTES
    assert read(await attach("c", await client.card(tuned), "cpu:2")) == second
    last = await watched.until_copied(TENSORS + 2, TENSORS)
    assert last.memory[1].peer_bytes > TENSORS // 2 * PAGE_BYTES
    assert last.read_bytes - both.read_bytes < TENSORS // 2 * PAGE_BYTES, "the other device has all of it"
    for instance in "abc":
        await client.release(instance)
    stop.set()
    assert await asyncio.wait_for(running, 60) == 0
    await mesh.stop()
