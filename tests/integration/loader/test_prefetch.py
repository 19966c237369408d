"""Prefetched weights: a loader process on real NATS, 100 MB for unused weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contracts.base import Done
from shared.contracts.loader import CancelPrefetch, LoaderStatus, PrefetchWeights
from shared.contracts.models import ModelCard
from shared.errors import StaleToken
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.test_dram import loader
from tests.integration.loader.test_service import client_card_of_sparse, status_where
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from tests.unit.loader.segments import assert_same

GIB = 1 << 30
__all__ = ["loader"]


async def prefetch(client: Client, card: ModelCard, token: int = 2 << 32) -> None:
    await client.mesh.request(client._subject, PrefetchWeights(token=token, card=card), Done)


def in_memory(card: ModelCard, status: LoaderStatus) -> bool:
    return any(c.weights_id == card.info.revision and c.tier == "dram" for c in status.cached)


async def test_prefetched_weights_attach_without_a_read(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    card = await client.card(tmp_path / "m")
    await prefetch(client, card)
    await status_where(client, loader.node, lambda s: in_memory(card, s) and not s.segments)
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()  # no more reads
    assert_same(await client.attach("i1", card), weights)


async def test_prefetch_yields_to_a_load_for_a_request(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "large", 2 * GIB)
    write_checkpoint(tmp_path / "m", tensors(megabytes=40))
    large, card = await client_card_of_sparse(client, tmp_path / "large"), await client.card(tmp_path / "m")
    await prefetch(client, large)
    await status_where(client, loader.node, lambda s: any(x.weights_id == large.info.revision for x in s.segments))
    await client.attach("i1", card)
    gone = await status_where(client, loader.node, lambda s: [x.weights_id for x in s.segments] == [card.info.revision])
    assert not in_memory(large, gone)


async def test_a_prefetch_of_requested_weights_continues(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=80))
    card = await client.card(tmp_path / "m")
    await prefetch(client, card)
    await prefetch(client, card)
    assert_same(await client.attach("i1", card), weights)
    await status_where(client, loader.node, lambda s: bool(s.segments) and s.segments[0].holders == ("i1",))


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
    await status_where(client, loader.node, lambda s: not s.segments and not in_memory(card, s))
    await client.release("nobody")
