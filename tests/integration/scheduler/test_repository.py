"""Writes as large as a large cluster's, on real PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.entities import Device, Entity, Instance, Node
from services.scheduler.domain.state import Put

COUNT = 2500
"""Times 20 columns is more than PostgreSQL takes as parameters of one statement."""


async def test_any_number_of_rows_in_one_transaction(database_url: str) -> None:
    engine = connect(database_url)
    try:
        await migrate(engine)
        repository = Repository(engine)
        nodes = [Node(f"n{n}", devices=(Device("cuda:0", "cuda", "", 10),)) for n in range(COUNT)]
        instances = [
            Instance(f"i{n}", f"p{n}", "m", 1, "r", f"n{n}", ("cuda:0",), n, 1, 1, requested_at=1.0, planned_at=2.0)
            for n in range(COUNT)
        ]
        async with leadership(plain_url(database_url)) as term:
            first: list[Entity] = [*nodes, *instances]
            await repository.commit(term.epoch, [Put(e) for e in first])
            later = [replace(i, leave_reason="again") for i in instances]
            await repository.commit(term.epoch, [Put(i) for i in later])
            state = await repository.load(term.epoch, now=10.0)
        assert state.instances == {i.instance_id: i for i in later}
        assert state.nodes == {n.name: n for n in nodes}
    finally:
        await engine.dispose()
