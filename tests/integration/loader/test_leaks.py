"""Failed loads leave no chunk, descriptor, mapping or record in a running loader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from shared.contracts.models import ModelCard
from shared.errors import CheckpointInvalid, InsufficientMemory, ThawError
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.local_socket import path_of
from tests.integration.loader.sparse_models import GIB, client_card_of_sparse
from tests.integration.loader.statuses import status_where
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from weights.client import attach

Round = Callable[[LoaderProcess, Client, Path, str], Awaitable[None]]


async def complete(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    write_checkpoint(work / "m", tensors(megabytes=20))
    await client.attach(instance, await client.card(work / "m"))
    await client.release(instance)


async def called_off(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    write_sparse_checkpoint(work / "m", GIB)
    await client.attach(instance, await client_card_of_sparse(client, work / "m"), "index")
    await client.release(instance)


async def shrunk(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    """Truncate a file: the loader detects it before it allocates memory."""
    write_checkpoint(work / "m")
    card = await client.card(work / "m")
    file = work / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointInvalid, match="truncated"):
        await client.attach(instance, card)
    await client.release(instance)


async def gone(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    """Remove a shard."""
    write_checkpoint(work / "m", shards=2)
    card = await client.card(work / "m")
    next(iter(sorted((work / "m").glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointInvalid, match="missing"):
        await client.attach(instance, card)
    await client.release(instance)


async def too_large(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    write_sparse_checkpoint(work / "m", 2**43)
    card: ModelCard = await client_card_of_sparse(client, work / "m")
    with pytest.raises(InsufficientMemory):
        await client.attach(instance, card)
    await client.release(instance)


async def reader_gone(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    write_checkpoint(work / "m", tensors(megabytes=20))
    weights = await asyncio.to_thread(attach, path_of(loader), source=str(work / "m"), timeout=60)
    weights.close()


async def reader_refused(loader: LoaderProcess, client: Client, work: Path, instance: str) -> None:
    with pytest.raises(ThawError):
        await asyncio.to_thread(attach, path_of(loader), source=str(work / "none"), timeout=60)


@pytest.mark.parametrize(
    "what", [complete, called_off, shrunk, gone, too_large, reader_gone, reader_refused], ids=lambda f: f.__name__
)
async def test_failed_loads_leave_no_chunk_descriptor_or_mapping(
    loader: LoaderProcess, client: Client, tmp_path: Path, what: Round
) -> None:
    assert loader.process is not None
    process = psutil.Process(loader.process.pid)
    allowed = (0, 0)
    for number in range(4):
        work = tmp_path / str(number)
        work.mkdir()
        await what(loader, client, work, f"i{number}")
        await status_where(client, loader.node, lambda s: not s.segments and s.dram_bytes == 0)
        if number == 1:  # the first loads may allocate what stays for good: threads, their wake-up pipes
            await asyncio.to_thread(settled, process)
            allowed = descriptors_and_mappings(process)
        assert loader.memory() == 0
        assert list((loader.home / "nodes" / loader.node / "loader" / "weights").iterdir()) == []
    deadline = time.monotonic() + 60
    # The loop closes ended connections in its next turns.
    while any(now > before for now, before in zip(descriptors_and_mappings(process), allowed, strict=True)):
        assert time.monotonic() < deadline, (descriptors_and_mappings(process), allowed)
        await asyncio.sleep(0.05)


def descriptors_and_mappings(process: psutil.Process) -> tuple[int, int]:
    """Return how many files the process has open, and how many segments it maps."""
    mapped = [m for m in process.memory_maps(grouped=False) if m.path.startswith("/dev/shm")]
    return process.num_fds(), len(mapped)


def settled(process: psutil.Process) -> None:
    """Wait until the loop has closed ended connections in its next turns."""
    deadline = time.monotonic() + 5
    before = -1
    while (now := process.num_fds()) != before and time.monotonic() < deadline:
        before = now
        time.sleep(0.05)
