"""Prefetched weights: a loader process on real NATS, 100 MB for unused weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from shared.contracts.base import Done
from shared.contracts.loader import (
    CancelPrefetch,
    FetchModelFiles,
    LoaderStatus,
    ModelFilesFetched,
    PrefetchStatus,
    PrefetchWeights,
)
from shared.contracts.models import ModelCard
from shared.errors import CheckpointInvalid, StaleToken
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.sparse_models import client_card_of_sparse
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import Faults, TierServer
from tests.support import slow_loader
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from tests.unit.loader.segments import assert_same

GIB = 1 << 30
MB = 1_000_000


@pytest.fixture
def loader_environment() -> dict[str, str]:
    """Give the loader a budget of 100 MB for unused weights."""
    return {"THAW_DRAM_BYTES": str(100 * MB)}


async def prefetch(client: Client, card: ModelCard, token: int = 2 << 32, tier: Literal["ssd", "dram"] = "dram") -> None:
    await client.mesh.request(client._subject, PrefetchWeights(token=token, card=card, tier=tier), Done)


def in_memory(card: ModelCard, status: LoaderStatus) -> bool:
    return any(c.weights_id == card.info.revision and c.tier == "dram" for c in status.cached)


def on_disk(card: ModelCard, status: LoaderStatus) -> bool:
    return any(c.weights_id == card.info.revision and c.tier == "ssd" for c in status.cached)


def is_over(token: int, state: str) -> Callable[[LoaderStatus], bool]:
    """Return whether a prefetch has that outcome in a status."""
    return lambda status: any(p.token == token and p.state == state for p in status.prefetches)


def outcome(token: int, status: LoaderStatus) -> PrefetchStatus:
    return next(p for p in status.prefetches if p.token == token)


@pytest.fixture
def www(tmp_path: Path) -> Iterator[TierServer]:
    """An HTTP server with the model `far`, of 20 MB."""
    write_checkpoint(tmp_path / "www" / "far", tensors(megabytes=20))
    server = TierServer(tmp_path / "www")
    yield server
    server.close()


async def test_prefetched_weights_attach_without_a_read(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    card = await client.card(tmp_path / "m")
    await prefetch(client, card)
    await status_where(client, loader.node, lambda s: in_memory(card, s) and not s.segments)
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()  # no more reads
    assert_same(await client.attach("i1", card), weights)


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_prefetch_yields_to_a_load_for_a_request(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "large", 2 * GIB)
    write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    large, card = await client_card_of_sparse(client, tmp_path / "large"), await client.card(tmp_path / "m")
    await prefetch(client, large)
    await status_where(client, loader.node, lambda s: any(x.weights_id == large.info.revision for x in s.segments))
    await client.attach("i1", card)
    gone = await status_where(client, loader.node, lambda s: [x.weights_id for x in s.segments] == [card.info.revision])
    assert not in_memory(large, gone)
    assert outcome(2 << 32, gone).state == "preempted"


async def test_a_prefetch_of_requested_weights_continues(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=80))
    card = await client.card(tmp_path / "m")
    await prefetch(client, card)
    await prefetch(client, card)
    assert_same(await client.attach("i1", card), weights)
    await status_where(client, loader.node, lambda s: bool(s.segments) and s.segments[0].holders == ("i1",))


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_prefetch_can_be_cancelled_and_a_stale_leader_is_refused(
    loader: LoaderProcess, client: Client, tmp_path: Path
) -> None:
    write_sparse_checkpoint(tmp_path / "large", 2 * GIB)
    large = await client_card_of_sparse(client, tmp_path / "large")
    await prefetch(client, large)
    await client.mesh.request(client._subject, CancelPrefetch(weights_id=large.info.revision), Done)
    await client.mesh.request(client._subject, CancelPrefetch(weights_id="unknown"), Done)
    await status_where(client, loader.node, lambda s: not s.segments and not in_memory(large, s))
    write_checkpoint(tmp_path / "m", tensors(megabytes=1))
    await client.prepare("i1", await client.card(tmp_path / "m"), token=3 << 32)
    with pytest.raises(StaleToken):
        await prefetch(client, large)


async def test_prefetch_of_unreadable_weights_is_forgotten(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=1))
    card = await client.card(tmp_path / "m")
    [file] = (tmp_path / "m").glob("*.safetensors")
    file.unlink()
    await prefetch(client, card)
    status = await status_where(client, loader.node, is_over(2 << 32, "failed"))
    assert not status.segments
    assert not in_memory(card, status)
    error = outcome(2 << 32, status).error
    assert error is not None
    assert error.code == "checkpoint_invalid"
    await client.release("nobody")


async def test_commands_for_the_same_weights_share_a_prefetch_to_both_tiers(
    loader: LoaderProcess, client: Client, www: TierServer
) -> None:
    www.faults = Faults(suffix="model.safetensors", stall_from=4 * MB)
    card = await client.card(f"{www.url}/far")
    await prefetch(client, card, 1, "ssd")
    await prefetch(client, card, 2, "dram")
    await status_where(client, loader.node, lambda s: is_over(1, "running")(s) and is_over(2, "running")(s))
    www.faults = Faults()
    www.unblocked.set()
    await status_where(client, loader.node, lambda s: is_over(1, "complete")(s) and is_over(2, "complete")(s))
    await status_where(client, loader.node, lambda s: in_memory(card, s) and on_disk(card, s))


async def test_weights_that_only_memory_has_are_fetched_to_the_disk(loader: LoaderProcess, client: Client, www: TierServer) -> None:
    card = await client.card(f"{www.url}/far")
    await client.attach("i1", card)
    await status_where(client, loader.node, lambda s: on_disk(card, s))
    entry = loader.home / "cache" / "entries" / card.info.revision
    assert (entry / "entry.json").is_file()
    (entry / "entry.json").unlink()  # as an eviction does first
    await status_where(client, loader.node, lambda s: not on_disk(card, s))
    await prefetch(client, card, tier="ssd")
    await status_where(client, loader.node, lambda s: is_over(2 << 32, "complete")(s) and on_disk(card, s))


async def test_files_for_an_engine_that_reads_them_itself(
    loader: LoaderProcess, client: Client, www: TierServer, tmp_path: Path
) -> None:
    card = await client.card(f"{www.url}/far")
    fetched = await client.mesh.request(client._subject, FetchModelFiles(card=card), ModelFilesFetched)
    copy, original = (d / "model.safetensors" for d in (Path(fetched.directory), tmp_path / "www" / "far"))
    assert copy.read_bytes() == original.read_bytes()
    assert not any(c.tier == "dram" for c in (await status_where(client, loader.node, lambda s: on_disk(card, s))).cached)
    near = await client.card(str(tmp_path / "www" / "far"))
    there = await client.mesh.request(client._subject, FetchModelFiles(card=near), ModelFilesFetched)
    assert Path(there.directory) == tmp_path / "www" / "far"
    write_checkpoint(tmp_path / "www" / "far", tensors(megabytes=10))
    with pytest.raises(CheckpointInvalid, match="changed"):
        await client.mesh.request(client._subject, FetchModelFiles(card=near), ModelFilesFetched)


async def test_prefetch_to_a_disk_without_room_fails_before_it_downloads(
    nats_server: NatsServer, client: Client, loader: LoaderProcess, www: TierServer
) -> None:
    loader.end()
    loader.environment["THAW_CACHE_BYTES"] = str(5 * MB)
    loader.start()
    await client.until_served(loader)
    card = await client.card(f"{www.url}/far")
    sent = sum(www.sent.values())
    await prefetch(client, card, tier="ssd")
    status = await status_where(client, loader.node, is_over(2 << 32, "failed"))
    error = outcome(2 << 32, status).error
    assert error is not None
    assert (error.code, "THAW_CACHE_BYTES" in error.message) == ("store_full", True)
    assert sum(www.sent.values()) == sent


async def test_the_progress_of_a_download_moves_with_its_pieces(loader: LoaderProcess, client: Client, www: TierServer) -> None:
    """The bytes of a prefetch are reported in memory, and on the disk where no load brings them."""
    www.faults = Faults(suffix="model.safetensors", stall_from=12 * MB)
    card = await client.card(f"{www.url}/far")
    await prefetch(client, card, 1, "ssd")
    half = await status_where(client, loader.node, lambda s: outcome(1, s).loaded_bytes > 0)
    assert 0 < outcome(1, half).loaded_bytes < outcome(1, half).total_bytes
    rate = await status_where(client, loader.node, lambda s: outcome(1, s).bytes_per_second is not None)
    assert outcome(1, rate).state == "running"
    www.faults = Faults()
    www.unblocked.set()
    await status_where(client, loader.node, lambda s: is_over(1, "complete")(s) and on_disk(card, s))
    await client.attach("i1", card)
    shutil.rmtree(loader.home / "cache" / "entries" / card.info.revision)
    await status_where(client, loader.node, lambda s: not on_disk(card, s))
    www.unblocked.clear()
    www.faults = Faults(suffix="model.safetensors", stall_from=12 * MB)
    await prefetch(client, card, 2, "ssd")
    half = await status_where(client, loader.node, lambda s: 0 < outcome(2, s).loaded_bytes < outcome(2, s).total_bytes)
    assert half.segments[0].loaded_bytes == half.segments[0].total_bytes, "memory has all: the disk is what is measured"
    www.faults = Faults()
    www.unblocked.set()
    await status_where(client, loader.node, lambda s: is_over(2, "complete")(s) and on_disk(card, s))


async def test_a_cancelled_command_leaves_the_loads_of_others(loader: LoaderProcess, client: Client, www: TierServer) -> None:
    www.faults = Faults(suffix="model.safetensors", stall_from=4 * MB)
    card = await client.card(f"{www.url}/far")
    await prefetch(client, card, 1, "ssd")
    await prefetch(client, card, 2, "dram")
    attaching = asyncio.create_task(client.attach("i1", card))
    await status_where(client, loader.node, lambda s: any("i1" in x.holders for x in s.segments))
    for token in (1, 2):
        await client.mesh.request(client._subject, CancelPrefetch(weights_id=card.info.revision, token=token), Done)
    left = await status_where(client, loader.node, lambda s: not s.prefetches and bool(s.segments))
    assert left.segments[0].holders == ("i1",)
    www.faults = Faults()
    www.unblocked.set()
    assert (await attaching).loaded_bytes > 19 * MB
