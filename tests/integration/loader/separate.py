"""A loader in this process with separate cpu devices, over real NATS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from services.loader import app
from services.loader.settings import LoaderSettings
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.loader import AttachWeights, ExpectedModel, ExpectModels, LoaderStatus, WeightsAttached
from shared.contracts.models import ModelCard
from shared.contracts.segment import PagesHandle
from shared.mapping import map_extents
from shared.messaging import Mesh
from tests.integration.loader.conftest import Client
from tests.support.mesh_client import connected_mesh
from tests.support.patient_mesh import PatientMesh
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import write_checkpoint
from weights.convert.job import convert
from weights.devices.pacing import Pacer
from weights.pool.shm import SHM
from weights.store.units import PAGE_BYTES


def write_model(directory: Path, seeds: Iterable[int], *, hashed: bool = True) -> Path:
    """Write a checkpoint of one page-sized tensor for each seed.

    Args:
        directory: Gets the checkpoint.
        seeds: Seeds of the tensors.
        hashed: Convert the checkpoint, so that its index has hashes.
    """
    weights = {f"t{i}": np.random.default_rng(seed).random(PAGE_BYTES // 4, dtype=np.float32) for i, seed in enumerate(seeds)}
    write_checkpoint(directory / "original", weights)
    if not hashed:
        return directory / "original"
    convert(directory / "original", directory / "converted")
    return directory / "converted"


def read(found: WeightsAttached) -> bytes:
    """Return what an engine reads from the device."""
    assert isinstance(found.handle, PagesHandle), found.device_error
    mapped = map_extents(SHM / found.handle.file, found.handle.extents)
    try:
        return bytes(mapped)
    finally:
        mapped.close()


class SeparateLoader:
    """The loader, its client, and its latest status."""

    def __init__(self, mesh: Mesh, node: str) -> None:
        self.mesh, self.node, self.client = mesh, node, Client(mesh, node)
        self.changed = asyncio.Condition()
        self.status: LoaderStatus | None = None

    async def hear(self, status: LoaderStatus) -> None:
        async with self.changed:
            self.status = status
            self.changed.notify_all()

    async def until(self, found: Callable[[LoaderStatus], bool]) -> LoaderStatus:
        """Wait for such a status."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.status is not None and found(self.status))
        assert self.status is not None
        return self.status

    async def until_copied(self, *units: int, read: int = 0) -> LoaderStatus:
        """Wait until the devices have had so many units copied to them.

        Args:
            read: Units read from the source by loads that are over; they count when a load ends.
        """

        def found(status: LoaderStatus) -> bool:
            return [d.copied_bytes // PAGE_BYTES for d in status.memory] == list(units) and status.read_bytes >= read * PAGE_BYTES

        return await self.until(found)

    async def until_unmapped(self) -> LoaderStatus:
        """Wait until no device has a mapped page."""
        found = await self.until(lambda status: not any(d.mapped_bytes for d in status.memory))
        assert all(not d.violations for d in found.memory)
        return found

    async def expect(self, *cards: ModelCard) -> None:
        """Send the loader expectations, as the scheduler does."""
        models = tuple(ExpectedModel(weights_id=c.info.revision, source=c.info.source, likelihood=0.5) for c in cards)
        await self.mesh.request(subjects.loader_command(self.node), ExpectModels(token=1, horizon_s=120, models=models), Done)

    async def attach(self, instance: str, card: ModelCard, device: str) -> WeightsAttached:
        ask = AttachWeights(instance_id=instance, card=card, until="complete", device=device, deadline_ms=60_000)
        return await self.mesh.request(subjects.loader_command(self.node), ask, WeightsAttached)


@contextmanager
def held_links() -> Iterator[None]:
    """Let no copy over a link with a pace end before the block does."""
    may_end, book = threading.Event(), Pacer.book

    def book_later(pacer: Pacer, nbytes: int, now: float) -> float:
        may_end.wait()
        return book(pacer, nbytes, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pacer, "book", book_later)
        try:
            yield
        finally:
            may_end.set()


@asynccontextmanager
async def separate_loader(
    server: NatsServer, home: Path, devices: str, node: str, cache_bytes: int = 0
) -> AsyncIterator[SeparateLoader]:
    """Run a loader that checks every reused and copied unit.

    Args:
        devices: Separate devices, in the syntax of THAW_DEVICES.
        cache_bytes: Size of its SSD cache, under `home`.
    """
    async with connected_mesh(server, PatientMesh) as mesh:
        loader = SeparateLoader(mesh, node)
        await mesh.listen(subjects.loader_status(node), LoaderStatus, loader.hear).start()
        home.mkdir()
        settings = LoaderSettings(
            nats_url=SecretStr(server.url),
            home=home,
            node=node,
            dram_bytes=0,
            cache_bytes=cache_bytes,
            cache_dir=home / "cache",
            peer_host="",
            verify=True,
            devices=f"cpu:0=1GiB,{devices}",
        )
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(settings, stop))
        await loader.client.until_served()
        try:
            yield loader
        finally:
            stop.set()
            assert await asyncio.wait_for(running, 60) == 0
