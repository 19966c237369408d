"""The DRAM cache: unused weights stay in memory within a budget, and load at once.

They survive the loader's death.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shared.contracts.loader import CachedModel, LoaderStatus, PretouchStatus, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.statuses import status_where
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same

MB = 1_000_000


@pytest.fixture
def loader_environment() -> dict[str, str]:
    """Give the loader a budget of 100 MB for unused weights."""
    return {"THAW_DRAM_BYTES": str(100 * MB)}


async def load_and_release(
    client: Client, directory: Path, instance: str, megabytes: int = 40
) -> tuple[ModelCard, WeightsAttached]:
    write_checkpoint(directory, tensors(megabytes=megabytes))
    card = await client.card(directory, directory.name)
    found = await client.attach(instance, card)
    ask = ReleaseWeights(instance_id=instance, deadline_ms=60_000)
    released = await client.mesh.request(client._subject, ask, WeightsReleased)
    assert (released.freed_bytes, released.cached_bytes) == (0, found.total_bytes)
    return card, found


async def test_cached_weights_are_attached_without_a_load(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = tensors(megabytes=40)
    card, first = await load_and_release(client, tmp_path / "m", "i1")
    status = await status_where(client, loader.node, lambda s: bool(s.cached) and not s.segments)
    [cached] = [c for c in status.cached if c.tier == "dram"]
    assert cached == CachedModel(weights_id=card.info.revision, tier="dram", nbytes=first.total_bytes, source=card.info.source)
    assert (status.dram_bytes, status.dram_budget_bytes) == (first.total_bytes, 100 * MB)
    for file in (tmp_path / "m").glob("*.safetensors"):
        file.unlink()  # no more reads
    again = await client.attach("i2", card, "index")
    assert again.extents == first.extents
    assert again.loaded_bytes == again.total_bytes
    assert [p for p in again.phases if p.phase in (Phase.LOAD, Phase.FETCH)] == []
    assert_same(again, weights)
    assert (await status_where(client, loader.node, lambda s: bool(s.segments))).dram_bytes == 0


async def test_least_recently_used_weights_are_evicted_within_the_budget(
    loader: LoaderProcess, client: Client, tmp_path: Path
) -> None:
    cards = [await load_and_release(client, tmp_path / name, f"i-{name}") for name in ("a", "b", "c")]
    wanted = {card.info.revision for card, _ in cards[1:]}

    def is_so(s: LoaderStatus) -> bool:
        return {c.weights_id for c in s.cached if c.tier == "dram"} == wanted and s.dram_bytes <= 100 * MB

    status = await status_where(client, loader.node, is_so)
    assert status.dram_bytes == sum(found.total_bytes for _, found in cards[1:])
    await load_and_release(client, tmp_path / "d", "i-d")  # b's memory is evicted for it, and is proved free
    await status_where(client, loader.node, lambda s: s.dram_bytes == 2 * cards[0][1].total_bytes)
    assert loader.memory() <= 100 * MB


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_cached_weights_survive_sigkill_but_not_sigterm(
    loader: LoaderProcess, client: Client, tmp_path: Path, signum: signal.Signals
) -> None:
    card, first = await load_and_release(client, tmp_path / "m", "i1")
    loader.end(signum)
    assert loader.segments() == ([] if signum == signal.SIGTERM else [first.segment])
    loader.start()
    await client.until_served(loader)
    status = await status_where(client, loader.node, lambda s: True)
    if signum == signal.SIGTERM:
        assert [c for c in status.cached if c.tier == "dram"] == []
        return
    assert [c.weights_id for c in status.cached if c.tier == "dram"] == [card.info.revision]
    again = await client.attach("i2", card)
    assert again.extents == first.extents
    assert_same(again, tensors(megabytes=40))


async def test_a_smaller_budget_is_kept_after_a_restart(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    await load_and_release(client, tmp_path / "m", "i1")
    loader.end(signal.SIGKILL)
    loader.environment["THAW_DRAM_BYTES"] = "0"
    loader.start()
    await client.until_served(loader)
    await status_where(client, loader.node, lambda s: s.dram_budget_bytes == 0 and s.dram_bytes == 0)
    assert loader.memory() == 0


async def test_no_memory_is_prepared_while_the_mesh_starts(loader: LoaderProcess, client: Client) -> None:
    """The loader prepares no chunks while the mesh starts.

    By default it waits for ten quiet seconds.
    """
    status = await status_where(client, loader.node, lambda s: s.dram_budget_bytes > 0 and s.dram_bytes == 0)
    assert loader.memory() == 0
    assert status.pretouch == PretouchStatus(state="skipped", reason="turned off")


async def test_memory_is_prepared_at_the_start(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    loader.end(signal.SIGKILL)
    loader.environment["THAW_DRAM_READY_BYTES"] = str(64 * 1024 * 1024)
    loader.start()
    await client.until_served(loader)
    status = await status_where(client, loader.node, lambda s: s.dram_bytes == 64 * 1024 * 1024)
    assert status.dram_bytes == loader.memory()
    _, found = await load_and_release(client, tmp_path / "m", "i1")
    await status_where(client, loader.node, lambda s: s.dram_bytes >= found.total_bytes)
    assert loader.memory() <= 100 * MB
