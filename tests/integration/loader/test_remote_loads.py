"""Remote models through a loader process.

Weights go into the pool as they arrive, are cached on disk, and load from there the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from shared.contracts.loader import LoaderStatus
from shared.contracts.phases import Phase
from shared.errors import CheckpointInvalid, StaleToken
from tests.integration.loader.checksums import write_sums
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.local_socket import assert_arrived, path_of
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import TierServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same
from weights.client import attach


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TierServer]:
    server = TierServer(tmp_path / "www")
    yield server
    await asyncio.to_thread(server.close)


def kept(status: LoaderStatus) -> bool:
    return any(c.tier == "ssd" for c in status.cached)


async def test_model_is_fetched_once_and_then_loaded_from_disk(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    weights = write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=40), shards=2)
    card = await client.card(f"{server.url}/m")
    server.requests.clear()
    found = await client.attach("i1", card)
    assert_same(found, weights)
    assert (Path(found.directory) / "config.json").exists()
    [fetch] = [p for p in found.phases if p.phase is Phase.FETCH]
    assert fetch.detail["bytes"] == found.total_bytes
    assert [p for p in found.phases if p.phase is Phase.LOAD] == []
    status = await status_where(client, loader.node, kept)
    remote = f"remote:127.0.0.1:{server.port}"
    assert any(link.link == remote and link.bytes_per_second for link in status.links)
    await client.release("i1")
    assert loader.memory() == 0
    server.requests.clear()
    again = await client.attach("i2", card)
    assert_same(again, weights)
    assert [r for r in server.requests if r.path.endswith(".safetensors")] == []
    assert [p.phase for p in again.phases] == [Phase.LOAD]
    await client.release("i2")


async def test_loader_exits_cleanly_while_a_copy_is_being_written(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    loader.end()
    loader.environment["THAW_DRAM_BYTES"] = str(200_000_000)
    loader.start()
    await client.until_served(loader)
    write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=60), shards=2)
    await client.attach("i1", await client.card(f"{server.url}/m"))
    await client.release("i1")
    assert await asyncio.to_thread(loader.end) == 0
    assert loader.segments() == []


async def test_tensors_are_available_before_the_last_byte(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    expected = write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=60), shards=2)
    server.faults.suffix, server.faults.stall_after = "00002-of-00002.safetensors", 200_000
    weights = await asyncio.to_thread(attach, path_of(loader), source=f"{server.url}/m", timeout=60)

    def read() -> dict[str, bool]:
        """Read the tensors that are complete while the source holds back bytes."""
        early = {}
        for tensor, data in weights.tensors():
            found = np.frombuffer(data, expected[tensor.name].dtype).reshape(tensor.shape)
            assert np.array_equal(found, expected[tensor.name])
            early[tensor.name] = not server.unblocked.is_set()
            if tensor.nbytes > 1_000_000 and not server.unblocked.is_set():
                assert not weights.complete
                server.unblocked.set()
        return early

    early = await asyncio.to_thread(read)
    assert early.keys() == expected.keys()
    assert True in early.values()
    assert False in early.values()
    weights.close()


async def test_load_by_source_requests_each_file_once(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    expected = write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=20), shards=2)
    with await asyncio.to_thread(attach, path_of(loader), source=f"{server.url}/m", timeout=60) as weights:
        await asyncio.to_thread(assert_arrived, weights, expected)
        assert len(server.asked("/m/SHA256SUMS")) == len(server.asked("/m/config.json")) == 1
        ranges = [r.headers["Range"] for r in server.asked("00001-of-00002.safetensors")]
        assert len([r for r in ranges if r.startswith("bytes=0-")]) == 2, "the header, and the first piece"
        again = await asyncio.to_thread(attach, path_of(loader), source=f"{server.url}/m", timeout=60)
        assert again.complete, "it was asked again, in vain"
        again.close()

    def connections() -> int:
        assert loader.process is not None
        found = psutil.Process(loader.process.pid).net_connections("tcp")
        return sum(1 for c in found if getattr(c.raddr, "port", None) == server.port)

    await status_where(client, loader.node, lambda s: not s.segments and connections() == 0)


async def test_the_last_release_calls_a_download_off(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=40))
    card = await client.card(f"{server.url}/m")
    server.faults.stall_after = 1_000_000
    await client.attach("i1", card, "index")
    waiting = asyncio.create_task(client.attach("i1", card))
    await asyncio.to_thread(server.stalled.wait, 60)
    await client.release("i1")
    with pytest.raises(StaleToken):
        await waiting
    assert loader.memory() == 0
    server.unblocked.set()


async def test_bytes_with_a_wrong_checksum_are_refused_and_not_kept(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    directory = tmp_path / "www" / "m"
    write_checkpoint(directory, tensors(megabytes=20))
    write_sums(directory)
    card = await client.card(f"{server.url}/m")
    server.faults.damage = lambda data, offset: data[:-1] + b"x" if offset > 1_000_000 else data
    with pytest.raises(CheckpointInvalid):
        await client.attach("i1", card)
    await client.release("i1")
    await status_where(client, loader.node, lambda s: s.dram_bytes == 0 and not s.segments)
    assert loader.memory() == 0
