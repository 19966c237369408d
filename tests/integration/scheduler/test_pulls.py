"""Operators' pulls with a scheduler and a loader process."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.admin import ModelPulled, PullModel, PullOptions, RemoveModel
from shared.contracts.base import Done
from shared.contracts.models import ModelSpec
from shared.errors import CheckpointInvalid, Conflict, InvalidRequest, StoreFull
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.test_service import status_where
from tests.integration.loader.tiers_server import Faults, TierServer
from tests.integration.scheduler.conftest import Site
from tests.integration.scheduler.test_flow import ready
from tests.integration.scheduler.test_prefetch import MB, afar, holds, loader, node
from tests.support.fake_node import MIB, FakeNode

__all__ = ["afar", "loader", "node"]


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
