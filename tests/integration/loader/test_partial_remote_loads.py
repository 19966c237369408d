"""Partial loads of remote models: the SSD cache gets the whole model afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts.loader import LoaderStatus
from tests.integration.loader.separate import read, separate_loader, write_model
from tests.integration.loader.tiers_server import TierServer
from tests.support.servers import NatsServer
from weights.store.units import PAGE_BYTES

TENSORS = 10


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TierServer]:
    server = TierServer(tmp_path / "www")
    yield server
    await asyncio.to_thread(server.close)


def on_disk(status: LoaderStatus) -> set[str]:
    return {c.source.rsplit("/", 2)[-2] for c in status.cached if c.tier == "ssd"}


async def test_the_rest_is_fetched_after_the_load_and_a_load_of_the_model_takes_over(
    nats_server: NatsServer, server: TierServer, tmp_path: Path
) -> None:
    for name, first in (("base", 0), ("tuned", 2), ("other", 4)):
        write_model(tmp_path / "www" / name, range(first, first + TENSORS))
    devices = "cpu:1=64MiB/separate"
    async with separate_loader(nats_server, tmp_path / "home", devices, "n-partial-remote", cache_bytes=2**30) as loader:
        base, tuned, other = [
            await loader.client.card(f"{server.url}/{name}/converted/", name) for name in ("base", "tuned", "other")
        ]
        whole = read(await loader.attach("a", base, "cpu:1"))
        before = await loader.until(lambda s: on_disk(s) == {"base"} and s.read_bytes >= TENSORS * PAGE_BYTES)
        assert read(await loader.attach("b", tuned, "cpu:1"))[: 8 * PAGE_BYTES] == whole[2 * PAGE_BYTES :]
        after = await loader.until(lambda s: on_disk(s) == {"base", "tuned"})
        assert after.read_bytes - before.read_bytes < 4 * PAGE_BYTES, "the load itself has read what was missing"
        assert not any(c.tier == "dram" for c in after.cached)
        # A load of the whole model begins while the rest is being fetched.
        server.faults.piece_delay_s = 0.05
        partial = read(await loader.attach("c", other, "cpu:1"))
        server.faults.piece_delay_s = 0.0
        host = await loader.client.attach("host", other)
        assert host.loaded_bytes == host.total_bytes
        assert partial[: 6 * PAGE_BYTES] == whole[4 * PAGE_BYTES :]
        await loader.until(lambda s: on_disk(s) == {"base", "tuned", "other"})
        for instance in ("a", "b", "c", "host"):
            await loader.client.release(instance)
        await loader.until_unmapped()
