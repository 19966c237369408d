"""Queries of a mesh: ready instances, last plans and registered models."""

from __future__ import annotations

from shared.contracts.admin import ExplainPlan, PlanExplained
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState
from shared.contracts.plans import PlanRecord
from tests.integration.scheduler.conftest import Site
from tests.support.fake_node import FakeNode

READY = InstanceState.READY


def ready(node: FakeNode, model: str) -> bool:
    return any(i.state is READY for i in node.of(model))


async def plan_of(site: Site, model: str) -> PlanRecord:
    explained: PlanExplained = await site.ask(ExplainPlan(model=model), PlanExplained)
    return explained.plan


async def catalogue(site: Site) -> dict[str, ModelCard]:
    from services.scheduler.adapters.catalog import Catalog

    return {c.name: c for c in (await Catalog(site.mesh.nc.jetstream()).read()).values()}
