"""From demand to ready, and back to nothing, on real NATS and Postgres."""

from __future__ import annotations

import asyncio

from shared.contracts.admin import ExplainPlan, PlanExplained
from shared.contracts.node import InstanceState
from tests.integration.scheduler.conftest import Site, spec


async def test_demand_starts_one_instance_and_the_plan_tells_what_was_measured(site: Site) -> None:
    site.scheduler()
    node = await site.node()
    await site.add(spec("a"))
    noted = await asyncio.gather(*(site.demand("a", 3, gateway=f"g{i}") for i in range(20)))
    assert {n.outlook for n in noted} <= {"starting", "ready"}
    await site.until(lambda: any(i.state is InstanceState.READY for i in node.of("a")))
    assert len(node.starts("a")) == 1
    explained: PlanExplained = await site.ask(ExplainPlan(model="a"), PlanExplained)
    await site.until(lambda: _is_ready(site))
    explained = await site.ask(ExplainPlan(model="a"), PlanExplained)
    assert explained.plan.outcome == "ready"
    assert explained.plan.measured_ms is not None
    assert {"schedule", "load"} <= {s.phase.value for s in explained.plan.measured}
    assert (await site.demand("a", 1)).outlook == "ready"


async def _is_ready(site: Site) -> bool:
    explained: PlanExplained = await site.ask(ExplainPlan(model="a"), PlanExplained)
    return explained.plan.outcome == "ready"
