"""Parked models on real NATS and Postgres.

They also survive a restart of the scheduler or the node.
"""

from __future__ import annotations

import asyncio

from shared.contracts.node import InstanceState, ResumeInstance
from tests.integration.scheduler.conftest import Site, spec
from tests.support.fake_node import MIB, FakeNode


def parked(node: FakeNode, model: str) -> bool:
    return any(i.state is InstanceState.SUSPENDED for i in node.instances.values() if i.command.card.name == model)


async def shown(site: Site, model: str) -> str:
    (view,) = (m for m in (await site.view()).models if m.card.name == model)
    return view.park.state if view.park is not None else ""


async def test_all_are_parked_and_a_request_resumes(site: Site) -> None:
    site.scheduler()
    node = await site.node(suspends=True, budget=700 * MIB)
    await site.add(*(spec(name, park=True) for name in ("a", "b", "c")), spec("d"))
    await site.until(lambda: all(parked(node, name) for name in ("a", "b", "c")))
    assert not node.starts("d")

    async def reported() -> bool:
        return [await shown(site, name) for name in ("a", "b", "c", "d")] == ["parked"] * 3 + [""]

    await site.until(reported)
    await site.demand("b", 1)
    await site.until(lambda: bool(node.of("b")))
    assert len(node.starts("b")) == 1
    assert [c for c in node.commands if isinstance(c, ResumeInstance)]


async def test_the_next_leader_continues_the_parking(site: Site) -> None:
    task = site.scheduler()
    node = await site.node(suspends=True, hold_starts=asyncio.Event())
    await site.add(spec("a", park=True), spec("b", park=True), spec("c", park=True))
    await site.until(lambda: len(node.starts()) == 2)
    stop, _ = site.schedulers.pop()
    stop.set()
    await task
    assert node.hold_starts is not None
    node.hold_starts.set()
    site.scheduler()
    await site.until(lambda: all(parked(node, name) for name in ("a", "b", "c")))
    assert len(node.starts()) == 3


async def test_models_are_parked_again_on_a_node_that_lost_its_instances(site: Site) -> None:
    site.scheduler()
    node = await site.node(suspends=True)
    await site.add(spec("a", park=True))
    await site.until(lambda: parked(node, "a"))
    node.instances.clear()
    await node.restart()
    await site.until(lambda: parked(node, "a"))
    assert len(node.starts("a")) == 2


async def test_model_is_not_started_for_parking_if_it_cannot_be_suspended(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a", park=True))

    async def reported() -> bool:
        return await shown(site, "a") == "impossible"

    await site.until(reported)
    (view,) = (await site.view()).models
    assert view.park is not None
    assert "it is a fake" in view.park.reason
    assert not node.starts("a")
