"""How soon a scheduler leads a large mesh: its state read back from PostgreSQL, the catalogue in
NATS compared, the first decision made.

    python -m bench.scheduler_recovery [--nodes 1000] [--models 10000] [--rounds 3] [--json PATH]

Nodes have eight devices, each with two instances (idle); besides, a thousand plans, the parameters
learned of each instance's model on its node, and what each node holds. Real servers from their
wheels. Seconds on the wall, and of this process's CPU, which other work on the machine does not
change; the medians of `--rounds` terms.

- load:      the rows are read, checked and indexed.
- catalogue: the bucket of models is compared with the database (nothing is to be written). The
  scheduler leads meanwhile.
- first:     a request for a cold model, placed; the nodes reported meanwhile, which is in none of
             the figures but "in all".
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from bench.report import write
from bench.scheduler import NOW, PER_NODE, POLICY, Cluster
from services.scheduler.adapters.catalog import Catalog, ensure_streams
from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain import decide
from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.effects import SendStart
from services.scheduler.domain.events import DemandReceived
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Entity
from services.scheduler.domain.state.measurements import Estimate
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.demand import Demand
from shared.contracts.loader import CachedModel, LinkStatus
from shared.contracts.plans import PlanRecord
from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer, PostgresServer

PLANS = 1000
Times = dict[str, list[tuple[float, float]]]


async def fill(repository: Repository, epoch: int, cluster: Cluster) -> None:
    state = cluster.state
    kept: list[Entity] = [*state.models.values(), *state.nodes.values(), *state.instances.values()]
    kept += [
        Estimate(i.model, i.node, {q: Parameter(100.0, 5.0, 9) for q in ("init", "container", "profile", "bandwidth:ssd")})
        for i in state.instances.values()
    ]
    kept += [
        PlanRecord(plan_id=f"plan-{n}", model=f"model-{n}", created=NOW - n, trigger="demand", way="load", outcome="ready")
        for n in range(PLANS)
    ]
    for at in range(0, len(kept), 4096):
        await repository.commit(epoch, [Put(e) for e in kept[at : at + 4096]])
    for node, loader in state.loaders.items():
        held = tuple(CachedModel(weights_id=f"revision-{n}", tier="ssd", nbytes=1) for n in range(10))
        links = (LinkStatus(link="ssd:nvme0n1", bytes_per_second=2e9),)
        status = loader.status.model_copy(update={"cached": held, "links": links})
        await repository.keep_loaders(epoch, [LoaderPresence(node, NOW, status)])


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    wall, cpu = time.monotonic(), time.process_time()
    yield
    times.setdefault(name, []).append((time.monotonic() - wall, time.process_time() - cpu))


async def term(url: str, repository: Repository, catalog: Catalog, cluster: Cluster, times: Times) -> None:
    async with leadership(plain_url(url)) as lead:
        with timed(times, "in all"):
            with timed(times, "load"):
                state = await repository.load(lead.epoch, NOW)
            with timed(times, "catalogue"):
                await catalog.reconcile([m.card for m in state.models.values()])
            entities: list[Entity] = [*cluster.state.presence.values(), *cluster.state.reports.values()]
            apply(state, [Put(e) for e in entities])
            with timed(times, "first"):
                _decide_first(state, cluster)
        if (len(state.instances), len(state.models)) != (len(cluster.state.instances), len(cluster.state.models)):
            raise RuntimeError("not everything was recovered")


def _decide_first(state: ClusterState, cluster: Cluster) -> None:
    demand = Demand(gateway="g", model=cluster.cold[0], waiting=1)
    decision = decide(state, DemandReceived(NOW, demand, "w"), NOW + 10, POLICY)
    if not any(isinstance(e, SendStart) for e in decision.effects):
        raise RuntimeError("the first demand was not placed")


async def measure(nodes: int, models: int, rounds: int) -> Times:
    times: Times = {}
    nats, postgres = NatsServer(), PostgresServer(durable=True)
    cluster = Cluster(nodes * PER_NODE, 2, cold=models - max(1, min(nodes * PER_NODE, 1000) // 2))
    url = postgres.create_database("recovery")
    engine = connect(url)
    mesh = Mesh(CommonSettings(nats_url=SecretStr(nats.url)), "bench")
    try:
        await migrate(engine)
        await mesh.start()
        js = mesh.nc.jetstream()
        await ensure_streams(js)
        catalog, repository = Catalog(js), Repository(engine)
        async with leadership(plain_url(url)) as lead:
            await fill(repository, lead.epoch, cluster)
        await catalog.reconcile([m.card for m in cluster.state.models.values()])
        for _ in range(rounds):
            await term(url, repository, catalog, cluster, times)
    finally:
        await mesh.stop()
        await engine.dispose()
        postgres.close()
        nats.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    times = asyncio.run(measure(options.nodes, options.models, options.rounds))
    title = f"A new leader of {options.nodes:,} nodes with {PER_NODE} devices, {options.models:,} models"
    table = Table("", "seconds", "of CPU", title=title)
    figures: dict[str, float] = {}
    for name, taken in times.items():
        wall, cpu = (statistics.median(x) for x in zip(*taken, strict=True))
        table.add_row(name, f"{wall:.2f}", f"{cpu:.2f}")
        figures |= {f"{name}.seconds": wall, f"{name}.cpu_seconds": cpu}
    Console(width=100).print(table)
    write(options.json, figures)


if __name__ == "__main__":
    main()
