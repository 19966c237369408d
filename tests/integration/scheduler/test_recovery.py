"""Recovery on a small mesh, timed as bench/scheduler_recovery.py does."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from bench.scheduler import NOW, POLICY, Cluster
from bench.scheduler_recovery import PLANS, Times, fill, term
from services.scheduler.adapters.catalog import Catalog, ensure_streams
from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain import decide
from services.scheduler.domain.effects import SendStart
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Entity
from services.scheduler.domain.state.measurements import ANYWHERE
from shared.contracts.demand import Demand
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(32, 2, cold=30)


async def test_new_leader_restores_its_state_and_places_the_first_request(
    own_nats: NatsServer, migrated_url: str, cluster: Cluster
) -> None:
    engine, mesh = connect(migrated_url), Mesh(CommonSettings(nats_url=SecretStr(own_nats.url)), "test")
    times: Times = {}
    try:
        await migrate(engine)
        await mesh.start()
        await ensure_streams(mesh.nc.jetstream())
        catalog, repository = Catalog(mesh.nc.jetstream()), Repository(engine)
        async with leadership(plain_url(migrated_url)) as lead:
            await fill(repository, lead.epoch, cluster)
        await catalog.reconcile([m.card for m in cluster.state.models.values()])
        for _ in range(2):
            await term(migrated_url, repository, catalog, cluster, times)
        assert {name: len(taken) for name, taken in times.items()} == {"load": 2, "catalogue": 2, "first": 2, "in all": 2}
        async with leadership(plain_url(migrated_url)) as lead:
            state = await repository.load(lead.epoch, NOW)
        before = cluster.state
        assert (state.models, state.nodes, state.instances) == (before.models, before.nodes, before.instances)
        assert {c.name for c in (await catalog.read()).values()} == set(before.models)
        assert len(state.plans) <= PLANS
        assert {e.node for e in state.estimates.values() if e.model} == set(before.nodes) - {ANYWHERE}
        assert set(state.on_disk) == {f"revision-{n}" for n in range(10)}
        assert _first(_with_reports(state, before), cluster.cold[0]) == _first(_with_reports(before, before), cluster.cold[0])
    finally:
        await mesh.stop()
        await engine.dispose()


def _with_reports(state: ClusterState, before: ClusterState) -> ClusterState:
    """Return the state after nodes and loaders have reported to a new leader."""
    state.epoch, state.recovered_at = 9, NOW - 100
    reports: list[Entity] = [*before.presence.values(), *before.reports.values(), *before.loaders.values()]
    apply(state, [Put(e) for e in reports])
    return state


def _first(state: ClusterState, model: str) -> list[tuple[str, tuple[str, ...]]]:
    decision = decide(state, DemandReceived(NOW, Demand(gateway="g", model=model, waiting=1), "w"), NOW, POLICY)
    return [(e.node, e.command.device_ids) for e in decision.effects if isinstance(e, SendStart)]
