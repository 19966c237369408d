"""A start that a node holds while a test disturbs the leader."""

from __future__ import annotations

from shared.contracts.node import InstanceState, StopInstance
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.queries import plan_of
from tests.support.fake_node import FakeNode


async def begin_start(site: Site) -> None:
    """Begin a start that does not end yet; its node has reported it to the leader."""
    await site.add(spec("a", replicas={"min": 1, "max": 1}))

    async def is_loading() -> bool:
        return [i.state for n in (await site.view()).nodes for i in n.instances] == [InstanceState.LOADING]

    await site.until(is_loading)


async def end_start(site: Site, node: FakeNode) -> None:
    """Check that the start is still under way, and let it end."""
    plan = await plan_of(site, "a")
    assert plan.outcome == "pending", plan.reason
    assert node.hold_starts is not None
    node.hold_starts.set()

    async def is_ready() -> bool:
        return (await plan_of(site, "a")).outcome == "ready"

    await site.until(is_ready)
    assert len(node.started("a")) == 1
    assert not [c for c in node.commands if isinstance(c, StopInstance)]
