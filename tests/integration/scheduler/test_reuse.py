"""Reuse from the loader's report to the recorded plan, on real NATS and Postgres."""

from __future__ import annotations

from shared.contracts.loader import DeviceMemory, ExpectModels, PrepareWeights, WeightsOnDevice
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.queries import plan_of, ready
from tests.support.fake_node import MIB


def with_units(missing_bytes: int) -> DeviceMemory:
    units = WeightsOnDevice(
        weights_id="rev-/models/m",
        total_bytes=64 * MIB,
        missing_bytes=missing_bytes,
        read_bytes=missing_bytes,
        unmapped_bytes=64 * MIB,
    )
    return DeviceMemory(
        device_id="cpu:0",
        total_bytes=1024 * MIB,
        free_bytes=1024 * MIB - 64 * MIB,
        mapped_bytes=0,
        reusable_bytes=64 * MIB,
        weights=(units,),
    )


async def test_a_model_starts_where_its_units_are_and_the_plan_says_so(site: Site) -> None:
    await site.node(node="node-0", memory=(with_units(60 * MIB),))
    best = await site.node(node="node-1", memory=(with_units(4 * MIB),))
    await site.node(node="node-2")
    site.scheduler()
    await site.add(spec("m"))
    loaders = {n.node: n for n in site.nodes}

    async def reported() -> bool:
        view = await site.view()
        return sum(bool(n.loader and n.loader.memory) for n in view.nodes) == 2

    await site.until(reported)
    await site.demand("m", 1)
    await site.until(lambda: ready(best, "m"))
    assert [c.device for c in best.commands if isinstance(c, PrepareWeights)] == ["cpu:0"]
    chosen = (await plan_of(site, "m")).chosen
    assert chosen is not None
    assert (chosen.node, chosen.ready_by, chosen.already_there) == ("node-1", "reuse", "60.0 of 64.0 MiB already on cpu:0")
    [shown] = [n for n in (await site.view()).nodes if n.node == "node-1"]
    assert shown.loader is not None
    assert shown.loader.memory[0].weights[0].missing_bytes == 4 * MIB

    def expected(node: str) -> list[ExpectModels]:
        return [c for c in loaders[node].commands if isinstance(c, ExpectModels)]

    await site.until(lambda: bool(expected("node-0") and expected("node-1")))
    assert not expected("node-2"), "it has no separate device"
    assert expected("node-1")[-1].horizon_s > 0
