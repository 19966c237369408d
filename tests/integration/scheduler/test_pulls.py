"""Operators' pulls with a scheduler and a loader process."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.admin import CancelPulls, ModelPulled, PullModel, PullOptions, PullsCancelled, PullTarget, RemoveModel
from shared.contracts.base import Done
from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid, Conflict, InvalidRequest, PullCancelled, StoreFull
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import Faults, TierServer
from tests.integration.scheduler.conftest import MB, Site, process
from tests.integration.scheduler.loader_caches import holds
from tests.integration.scheduler.queries import ready
from tests.support.fake_node import MIB, FakeNode


async def begin(site: Site, loader: LoaderProcess, afar: TierServer) -> Client:
    """Register `likely` and `wanted`, for which no request arrives."""
    loader.start()
    client = Client(site.mesh, loader.node)
    await client.until_served()
    site.scheduler()
    models = [ModelSpec(name=name, source=f"{afar.url}/{name}", memory=150 * MIB) for name in ("likely", "wanted")]
    await site.add(*models)
    return client


def pull(site: Site, name: str = "likely", **options: str) -> asyncio.Task[ModelPulled]:
    message = PullModel(name=name, options=PullOptions.model_validate(options))
    return asyncio.create_task(site.ask(message, ModelPulled))


async def test_a_model_is_pulled_to_the_disk_and_then_into_memory_without_an_instance(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    afar.faults = Faults()
    client = await begin(site, loader, afar)
    pulled = await pull(site)
    assert (pulled.name, pulled.node, pulled.tier, pulled.was_there) == ("likely", "node-0", "ssd", False)
    assert pulled.nbytes > 19 * MB
    assert pulled.took_ms > 0
    there = await status_where(client, "node-0", holds("ssd"))
    assert not holds("dram")(there)
    sent = sum(afar.sent.values())
    again = await pull(site, node="node-0")
    assert (again.was_there, again.took_ms) == (True, 0.0)
    loaded = await pull(site, tier="dram")
    assert (loaded.tiers, loaded.was_there) == (("ssd", "dram"), False)
    await status_where(client, "node-0", holds("dram"))
    assert sum(afar.sent.values()) == sent, "its bytes came from the disk"
    assert not node.instances


async def test_a_pull_that_a_request_preempted_is_repeated(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    client = await begin(site, loader, afar)
    waiting = pull(site)
    await status_where(client, "node-0", lambda s: any(x.model == "likely" and x.loaded_bytes for x in s.segments))
    await site.demand("wanted", 1)
    await status_where(client, "node-0", lambda s: any(p.state == "preempted" for p in s.prefetches))
    await site.until(lambda: ready(node, "wanted"))
    await site.demand("wanted", 0)
    afar.faults = Faults()
    afar.unblocked.set()
    pulled = await asyncio.wait_for(waiting, 60)
    assert (pulled.node, pulled.was_there) == ("node-0", False)
    await status_where(client, "node-0", holds("ssd"))


async def test_a_pull_continues_when_its_loader_is_restarted(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    client = await begin(site, loader, afar)
    waiting = pull(site)
    await status_where(client, "node-0", lambda s: any(x.model == "likely" and x.loaded_bytes for x in s.segments))
    afar.faults = Faults()
    afar.unblocked.set()
    loader.end(9)
    loader.start()
    await client.until_served(loader)
    assert (await asyncio.wait_for(waiting, 60)).node == "node-0"


async def test_a_pull_ends_with_the_removal_of_its_model(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    client = await begin(site, loader, afar)
    waiting = pull(site)
    await status_where(client, "node-0", lambda s: any(x.model == "likely" for x in s.segments))
    await site.ask(RemoveModel(name="likely"), Done)
    with pytest.raises(Conflict, match="removed or changed"):
        await waiting
    await status_where(client, "node-0", lambda s: not s.segments)


def count_pieces(loader: LoaderProcess) -> int:
    """Return the bytes of the journal of the model that is being fetched to the disk."""
    return sum(f.stat().st_size for f in (loader.home / "cache" / "partial").glob("*/*") if "journal" in f.name)


async def test_a_cancelled_pull_frees_its_memory_and_leaves_its_pieces(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    afar.faults = Faults(suffix="likely/model.safetensors", piece_delay_s=0.1)
    client = await begin(site, loader, afar)
    waiting = pull(site)

    async def is_half_done() -> bool:
        return any(0 < p.loaded_bytes < p.total_bytes for p in (await site.view()).pulls)

    await site.until(is_half_done)
    [shown] = (await site.view()).pulls
    assert (shown.model, shown.node, shown.tier, shown.state) == ("likely", "node-0", "ssd", "running")
    assert shown.total_bytes > 19 * MB
    before = count_pieces(loader)
    await site.until(lambda: count_pieces(loader) > before)
    cancelled = await site.ask(CancelPulls(name="likely"), PullsCancelled)
    assert cancelled.cancelled == (PullTarget(node="node-0", tier="ssd"),)
    with pytest.raises(PullCancelled, match="disk cache of node-0 was cancelled"):
        await waiting
    await status_where(client, "node-0", lambda s: not s.segments and not any(p.state == "running" for p in s.prefetches))
    assert (await site.view()).pulls == ()
    assert (await site.ask(CancelPulls(name="likely"), PullsCancelled)).cancelled == ()
    sent = dict(afar.sent)
    afar.faults = Faults()
    assert (await pull(site)).was_there is False
    path = "/likely/model.safetensors"
    assert afar.sent[path] - sent[path] < shown.total_bytes - MB, "the pieces on the disk are not fetched again"


async def test_a_pull_without_a_client_outlives_its_leader_and_its_loader(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    first = await process(site, "first")
    try:
        loader.start()
        client = Client(site.mesh, loader.node)
        await client.until_served()
        await site.add(ModelSpec(name="likely", source=f"{afar.url}/likely", memory=150 * MIB))
        waiting = pull(site)
        await status_where(client, "node-0", lambda s: any(x.model == "likely" and x.loaded_bytes for x in s.segments))
        waiting.cancel()
        first.kill()
        loader.end(9)
    finally:
        await first.communicate()
    afar.faults = Faults()
    afar.unblocked.set()
    loader.start()
    await client.until_served(loader)
    assert not holds("ssd")(await status_where(client, "node-0", lambda s: True)), "the loader has forgotten the command"
    site.scheduler()
    await status_where(client, "node-0", holds("ssd"))

    async def is_over() -> bool:
        return not (await site.view()).pulls

    await site.until(is_over)
    assert not node.instances


async def test_the_error_of_a_load_is_the_reply(site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer) -> None:
    loader.environment["THAW_CACHE_BYTES"] = str(5 * MB)
    await begin(site, loader, afar)
    with pytest.raises(StoreFull, match="THAW_CACHE_BYTES"):
        await pull(site)
    await site.add(ModelSpec(name="local", source=str(afar.directory / "wanted"), memory=150 * MIB))
    with pytest.raises(InvalidRequest, match="--to dram"):
        await pull(site, "local")
    assert (await pull(site, "local", tier="dram")).tier == "dram"
    afar.faults = Faults(suffix="likely/model.safetensors", status=404)
    with pytest.raises(CheckpointInvalid, match="has no weights"):
        await pull(site, tier="dram")
