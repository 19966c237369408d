"""The shell around the decisions, in one process without a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.loader.adapters.records import Records
from services.loader.adapters.runs import Runs
from services.loader.adapters.shm import segments
from services.loader.handlers import Loader
from shared.contracts.loader import AttachWeights, Inspected, InspectModel, WeightsAttached
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus
from shared.contracts.segment import segment_prefix
from shared.errors import ShuttingDown
from tests.unit.loader.checkpoints import write_checkpoint


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A loader of its own with a clock that stands still."""

    def __init__(self, home: Path) -> None:
        self.clock = Clock()
        self.prefix = segment_prefix(home, "n")
        self.records = Records(home / "loader", self.prefix)
        (home / "loader" / "segments").mkdir(parents=True)
        self.loader = Loader("n", "boot", self.records, lambda emit: Runs(self.prefix, 2, emit), self.clock)

    async def card(self, directory: Path) -> ModelCard:
        spec = ModelSpec(name="m", source=str(directory))
        found = await self.loader.handle(InspectModel(spec=spec))
        assert isinstance(found, Inspected)
        return ModelCard(spec=spec, info=found.info, created=0)

    async def attach(self, instance: str, card: ModelCard) -> WeightsAttached:
        found = await self.loader.handle(AttachWeights(instance_id=instance, card=card, until="complete"))
        assert isinstance(found, WeightsAttached)
        return found

    async def node_knows(self, card: ModelCard, **instances: InstanceState) -> None:
        listed = tuple(
            InstanceStatus(
                instance_id=i,
                plan_id="p",
                token=1,
                model="m",
                generation=1,
                revision=card.info.revision,
                device_ids=("cpu:0",),
                state=s,
            )
            for i, s in instances.items()
        )
        await self.loader.hear_node(NodeStatus(node="n", boot_id="b", seq=1, devices=(), instances=listed))

    async def until_segments(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.loader.status().segments) != count:
                await self.loader.changed.wait()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "home")
    yield bench
    await bench.loader.stop()
    for name in segments(bench.prefix):
        (Path("/dev/shm") / name).unlink()


async def test_weights_of_instances_the_node_lost_are_removed(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    await bench.attach("a", card)
    await bench.attach("b", card)
    bench.clock.now += 60
    await bench.node_knows(card, a=InstanceState.READY, b=InstanceState.STOPPED)
    bench.clock.now += 5
    await bench.node_knows(card, a=InstanceState.READY, b=InstanceState.STOPPED)
    assert bench.loader.status().segments[0].holders == ("a",)
    await bench.node_knows(card)
    bench.clock.now += 5
    await bench.node_knows(card)
    await bench.until_segments(0)
    assert segments(bench.prefix) == []
    assert bench.records.recover() == []


async def test_holders_are_written_down(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    found = await bench.attach("a", card)
    await bench.attach("b", card)
    [record] = bench.records.recover()
    assert record.holders == ("a", "b")
    assert record.segment == found.segment
    next_life = Loader("n", "boot2", bench.records, lambda emit: Runs(bench.prefix, 2, emit), bench.clock)
    next_life.adopt([record])
    assert next_life.status().segments[0].holders == ("a", "b")
    await next_life.stop()
    assert segments(bench.prefix) == [found.segment]


async def test_a_stopped_loader_refuses(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await bench.card(tmp_path / "m")
    await bench.loader.stop()
    with pytest.raises(ShuttingDown):
        await bench.attach("a", card)
