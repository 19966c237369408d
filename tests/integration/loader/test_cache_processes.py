"""Loaders that share a cache and die of SIGKILL, or need the same model at once."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.loader.checksums import write_sums
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import TierServer
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same

NAME = "model.safetensors"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TierServer]:
    write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=60))
    write_sums(tmp_path / "www" / "m")
    server = TierServer(tmp_path / "www")
    yield server
    await asyncio.to_thread(server.close)


@pytest.fixture
async def second(loader: LoaderProcess, client: Client, nats_server: NatsServer) -> AsyncIterator[tuple[LoaderProcess, Client]]:
    """Start another node's loader on the same machine."""
    process = LoaderProcess(nats_server.url, loader.home, "second-node")
    process.log = loader.home / "second.log"
    process.start()
    other = Client(client.mesh, process.node)
    await other.until_served()
    yield process, other
    process.close()


def journaled(home: Path) -> int:
    """Return the bytes that the journal records as stored."""
    journals = list((home / "cache" / "partial").glob("*/journal"))
    lines = [line for j in journals for line in j.read_bytes().splitlines() if line.startswith(b"[")]
    return sum(int(line.split(b",")[2]) for line in lines)


def asked_for(server: TierServer) -> int:
    """Return the bytes of weights in all requests."""
    ranges = [r.headers["Range"].removeprefix("bytes=").split("-") for r in server.asked(NAME)]
    return sum(int(end) - int(start) + 1 for start, end in ranges)


def until_journaled(home: Path, nbytes: int) -> None:
    deadline = time.monotonic() + 60
    while journaled(home) < nbytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_killed_loader_s_pieces_are_not_fetched_again(
    loader: LoaderProcess, client: Client, server: TierServer, tmp_path: Path
) -> None:
    card = await client.card(f"{server.url}/m")
    server.faults.stall_from = 20_000_000
    await client.attach("i1", card, "index")
    assert await asyncio.to_thread(server.stalled.wait, 60)
    await asyncio.to_thread(until_journaled, loader.home, 10_000_000)
    loader.end(signal.SIGKILL)
    there = journaled(loader.home)
    server.unblocked.set()
    server.requests.clear()
    loader.start()
    await client.until_served(loader)
    found = await client.attach("i2", card)
    assert_same(found, tensors(megabytes=60))
    size = (server.directory / "m" / NAME).stat().st_size
    assert asked_for(server) <= size - there + 200_000
    await status_where(client, loader.node, lambda s: any(c.tier == "ssd" for c in s.cached))
    await client.release("i2")


async def test_two_loaders_fetch_a_model_once(
    loader: LoaderProcess, client: Client, second: tuple[LoaderProcess, Client], server: TierServer
) -> None:
    _, other = second
    card = await client.card(f"{server.url}/m")
    await other.card(f"{server.url}/m")
    server.requests.clear()
    one, two = await asyncio.gather(client.attach("a1", card), other.attach("b1", card))
    assert_same(one, tensors(megabytes=60))
    assert_same(two, tensors(megabytes=60))
    size = (server.directory / "m" / NAME).stat().st_size
    assert asked_for(server) < size + 500_000
    await client.release("a1")
    await other.release("b1")


async def test_waiting_loader_takes_over_from_a_killed_one(
    loader: LoaderProcess, client: Client, second: tuple[LoaderProcess, Client], server: TierServer
) -> None:
    _, other = second
    card = await client.card(f"{server.url}/m")
    await other.card(f"{server.url}/m")
    server.faults.stall_from = 20_000_000
    await client.attach("a1", card, "index")
    assert await asyncio.to_thread(server.stalled.wait, 60)
    waiting = asyncio.create_task(other.attach("b1", card))
    await status_where(other, "second-node", lambda s: any(e.holders for e in s.segments))
    loader.end(signal.SIGKILL)
    server.unblocked.set()
    found = await waiting
    assert_same(found, tensors(megabytes=60))
    await other.release("b1")
