"""Reports of a loader with a separate device about weights, loaded or not, over real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.loader import app
from services.loader.settings import LoaderSettings
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.loader import (
    AttachWeights,
    DeviceMemory,
    ExpectedModel,
    ExpectModels,
    LoaderStatus,
    WeightsAttached,
    WeightsOnDevice,
)
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.errors import StaleToken
from shared.messaging import Mesh
from tests.integration.loader.conftest import Client
from tests.integration.loader.conversion import convert
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.store.units import PAGE_BYTES

NODE = "n-separate"
DEVICE = "cpu:1"


class Reports:
    def __init__(self) -> None:
        self._latest: DeviceMemory | None = None
        self._changed = asyncio.Condition()

    async def hear(self, status: LoaderStatus) -> None:
        async with self._changed:
            self._latest = status.memory[0] if status.memory else None
            self._changed.notify_all()

    async def until(self, wanted: Callable[[dict[str, WeightsOnDevice]], bool]) -> dict[str, WeightsOnDevice]:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self._latest is not None and wanted(self._rows()))
            return self._rows()

    def _rows(self) -> dict[str, WeightsOnDevice]:
        return {w.weights_id: w for w in self._latest.weights} if self._latest is not None else {}


@pytest.fixture
async def client(mesh: Mesh, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Client]:
    """A loader with a separate device of 32 pages."""
    settings = LoaderSettings.model_validate(
        {
            "nats_url": SecretStr(nats_server.url),
            "home": tmp_path / "home",
            "node": NODE,
            "dram_bytes": 0,
            "cache_bytes": 0,
            "peer_host": "",
            "devices": f"cpu:0=64MiB,{DEVICE}={32 * PAGE_BYTES}/separate",
        }
    )
    (tmp_path / "home").mkdir()
    stop = asyncio.Event()
    running = asyncio.create_task(app.run(settings, stop))
    client = Client(mesh, NODE)
    await client.until_served()
    yield client
    stop.set()
    assert await asyncio.wait_for(running, 60) == 0


async def load(client: Client, instance: str, card: ModelCard) -> WeightsAttached:
    ask = AttachWeights(instance_id=instance, card=card, until="complete", device=DEVICE, deadline_ms=60_000)
    found = await client.mesh.request(subjects.loader_command(NODE), ask, WeightsAttached)
    assert found.device_error is None
    return found


async def expect(client: Client, *cards: ModelCard, token: int = 1 << 32) -> None:
    models = tuple(ExpectedModel(weights_id=c.info.revision, source=c.info.source, likelihood=0.5) for c in cards)
    await client.mesh.request(subjects.loader_command(NODE), ExpectModels(token=token, horizon_s=120, models=models), Done)


async def test_missing_bytes_are_reported_for_loaded_models_and_for_those_with_hashes(client: Client, tmp_path: Path) -> None:
    reports = Reports()
    await client.mesh.listen(subjects.loader_status(NODE), LoaderStatus, reports.hear).start()
    weights = tensors(megabytes=9)
    write_checkpoint(tmp_path / "base", weights)
    write_checkpoint(tmp_path / "tuned", {**weights, "layers.1.weight": weights["layers.1.weight"] + 1})
    convert(tmp_path / "base", tmp_path / "base-out")
    convert(tmp_path / "tuned", tmp_path / "tuned-out")
    base, tuned = [await client.card(tmp_path / f"{name}-out", name) for name in ("base", "tuned")]

    attached = await load(client, "a", base)
    copied = [p for p in attached.phases if p.phase is Phase.LOAD and p.detail.get("device") == DEVICE]
    assert len(copied) == 1, "the start waited for the copy"
    rows = await reports.until(lambda rows: any(not w.missing_bytes for w in rows.values()))
    held = rows[base.info.revision]
    assert (held.unmapped_bytes, held.missing_bytes) == (0, 0)
    assert not [p for p in (await load(client, "b", base)).phases if p.detail.get("device") == DEVICE], "a later one did not"

    await expect(client, base, tuned)
    rows = await reports.until(lambda rows: tuned.info.revision in rows)
    shared = rows[tuned.info.revision]
    layer = weights["layers.1.weight"].nbytes
    assert layer <= shared.missing_bytes < shared.total_bytes
    assert shared.missing_bytes <= shared.unmapped_bytes
    assert rows[base.info.revision].exclusive_bytes > 0

    await client.prepare("old", base, token=5 << 32)
    with pytest.raises(StaleToken):
        await expect(client, base, token=1)
    for instance in ("a", "b", "old"):
        await client.release(instance)
    rows = await reports.until(lambda rows: rows[base.info.revision].unmapped_bytes > 0)
    assert rows[base.info.revision].missing_bytes == 0, "reusable"
