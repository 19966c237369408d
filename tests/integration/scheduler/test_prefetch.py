"""Prefetch with a scheduler and a loader process; waiting requests preempt it."""

from __future__ import annotations

import pytest

from services.scheduler.domain.prewarm import prefetch as prefetching
from shared.contracts.models import ModelSpec
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import Faults, TierServer
from tests.integration.scheduler.conftest import MB, Site, spec
from tests.integration.scheduler.loader_caches import holds
from tests.integration.scheduler.queries import ready
from tests.support.fake_node import MIB, FakeNode
from tests.unit.loader.checkpoints import tensors, write_checkpoint


async def begin(site: Site, loader: LoaderProcess, afar: TierServer) -> Client:
    """Request `likely` twice, without room for it, so that its prefetch begins."""
    loader.start()
    client = Client(site.mesh, loader.node)
    await client.until_served()
    write_checkpoint(loader.home / "full", tensors(megabytes=1, seed=2))
    site.scheduler()
    await site.add(
        ModelSpec(name="full", source=str(loader.home / "full"), pin=True, memory=800 * MIB),
        spec("likely", memory=900 * MIB).model_copy(update={"source": f"{afar.url}/likely"}),
        spec("wanted", memory=150 * MIB).model_copy(update={"source": f"{afar.url}/wanted"}),
    )
    (node,) = site.nodes
    await site.demand("full", 1)
    await site.until(lambda: ready(node, "full"))
    await site.demand("full", 0)
    for _ in range(2):
        assert (await site.demand("likely", 1)).outlook == "waiting"
        await site.demand("likely", 0)
    return client


async def test_a_likely_model_is_loaded_into_memory_but_not_while_a_request_needs_the_link(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "AGAIN_S", 0.5)
    client = await begin(site, loader, afar)
    await status_where(client, "node-0", lambda s: any(x.model == "likely" for x in s.segments))
    assert not holds("dram")(await status_where(client, "node-0", lambda s: True))
    await site.demand("wanted", 1)
    dropped = await status_where(client, "node-0", lambda s: not any(x.model == "likely" for x in s.segments))
    assert not holds("dram")(dropped)
    loaded = await status_where(
        client, "node-0", lambda s: any(x.model == "wanted" and x.loaded_bytes == x.total_bytes for x in s.segments)
    )
    assert not holds("dram")(loaded)
    await site.until(lambda: ready(node, "wanted"))
    await site.demand("wanted", 0)
    afar.faults = Faults()
    afar.unblocked.set()
    await status_where(client, "node-0", holds("dram"))


async def test_weights_without_room_in_memory_are_prefetched_to_the_disk(
    site: Site, node: FakeNode, loader: LoaderProcess, afar: TierServer
) -> None:
    loader.environment["THAW_DRAM_BYTES"] = str(1 * MB)
    afar.faults = Faults()
    client = await begin(site, loader, afar)
    there = await status_where(client, "node-0", holds("ssd"))
    assert not holds("dram")(there)
    card = await client.card(f"{afar.url}/likely", "likely")
    sent = sum(afar.sent.values())
    await client.attach("i", card)
    assert sum(afar.sent.values()) == sent, "its bytes lie on the disk"
