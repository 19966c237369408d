"""The loader process as configured on a machine with GPUs, over real NATS.

The driver copies in host memory.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.loader import app
from services.loader.settings import LoaderSettings
from shared.contracts import subjects
from shared.contracts.loader import AttachWeights, LoaderStatus, WeightsAttached
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, NodeStatus
from shared.contracts.segment import CudaIpcHandle
from shared.messaging import Mesh
from tests.integration.loader.conftest import Client
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.devices.fake_driver import FakeDriver
from weights.pool.shm import SHM

NODE = "n-gpu"


async def test_stopping_status_precedes_the_release_of_device_memory(
    mesh: Mesh, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(app, "has_driver", lambda: True)
    monkeypatch.setattr(app, "load_driver", lambda: driver)
    monkeypatch.setattr(app, "group_bytes", lambda *_, cache: 1 << 20)
    statuses: list[LoaderStatus] = []

    async def hear(status: LoaderStatus) -> None:
        statuses.append(status)

    await mesh.listen(subjects.loader_status(NODE), LoaderStatus, hear).start()
    settings = LoaderSettings(
        nats_url=SecretStr(nats_server.url), home=tmp_path / "home", node=NODE, dram_bytes=0, cache_bytes=0, peer_host=""
    )
    (tmp_path / "home").mkdir()
    stop = asyncio.Event()
    running = asyncio.create_task(app.run(settings, stop))
    client = Client(mesh, NODE)
    await client.until_served()
    write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    ask = AttachWeights(instance_id="a", card=card, until="complete", device="cuda:0", deadline_ms=60_000)
    assert (await mesh.request(subjects.loader_command(NODE), ask, WeightsAttached)).handle is None  # no setting allows it
    says = (Capability(name=WEIGHTS_ON_GPU, available=True),)
    await mesh.publish(subjects.node_status(NODE), NodeStatus(node=NODE, boot_id="b", seq=1, devices=(), capabilities=says))
    async with asyncio.timeout(60):
        while True:
            found = await mesh.request(subjects.loader_command(NODE), ask, WeightsAttached)
            if found.handle is not None:
                break
    assert isinstance(found.handle, CudaIpcHandle)
    stop.set()
    assert await asyncio.wait_for(running, 60) == 0
    await mesh.flush()
    [warned] = [s for s in statuses if s.stopping]
    assert warned.boot_id == found.boot_id
    assert warned.segments[0].on_devices == {"cuda:0": found.total_bytes}
    assert driver.memory == {}
    assert driver.pinned == {}
    (SHM / found.segment).unlink()
