"""Values that PostgreSQL refuses, in what other processes report: they end no leader's term."""

from __future__ import annotations

import json

import pytest

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.state.changes import Drop, Put
from services.scheduler.domain.state.entities import Model, Node
from shared.contracts import subjects
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import DeviceStatus, NodeStatus
from shared.contracts.plans import Candidate, PlanRecord
from shared.errors import EngineFailed
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.queries import ready
from tests.support.fake_node import model_info
from tests.support.node_statuses import READY, SUSPENDED, instance

LOG = "core dumped\0\0 by C:\\u0000 \\\0"
"""The end of an engine's log: NUL characters, and the text of their escape sequence."""
STORED = "core dumped\ufffd\ufffd by C:\\u0000 \\\ufffd"


async def test_nul_characters_are_replaced(migrated_url: str) -> None:
    engine = connect(migrated_url)
    card = ModelCard(spec=ModelSpec(name="a", source="/m/a"), info=model_info("/m/a", 100), created=0)
    candidate = Candidate(node="n", device_ids=("cpu:0",), way="load", excluded=LOG)
    plan = PlanRecord(
        plan_id="p",
        model="a",
        created=0.0,
        trigger="demand",
        way="load",
        candidates=(candidate,),
        reason=LOG,
        outcome="failed",
        error=EngineFailed(LOG).body(),
    )
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            written = [Put(Model(card, error=LOG)), Put(Node(f"n{LOG}", labels={LOG: LOG})), Put(plan)]
            await repository.commit(term.epoch, written)
            state = await repository.load(term.epoch, now=10.0)
            assert state.models["a"].error == STORED
            assert [(n.name, n.labels) for n in state.nodes.values()] == [(f"n{STORED}", {STORED: STORED})]
            kept = state.plans["p"]
            assert (kept.reason, kept.error.message if kept.error else "") == (STORED, STORED)
            assert [c.excluded for c in kept.candidates] == [STORED]
            await repository.commit(term.epoch, [Drop(Node, f"n{LOG}")])
            assert not (await repository.load(term.epoch, now=10.0)).nodes
    finally:
        await engine.dispose()


async def test_leader_survives_a_start_whose_error_has_nul_characters(site: Site) -> None:
    node = await site.node()
    site.scheduler()
    await site.add(spec("a"), spec("b"))
    before = await site.view()
    node.fail_starts = [EngineFailed(LOG).body()] * 2
    await site.demand("a", 1)
    await site.until(lambda: bool(site.failed))
    await site.demand("b", 1)
    await site.until(lambda: ready(node, "b"))
    after = await site.view()
    assert after.epoch == before.epoch
    assert site.failed[0].error.message == LOG
    assert [m.error for m in after.models if m.card.name == "a"] == [LOG]


@pytest.mark.parametrize("field", ["budget_bytes", "need_bytes", "reserved", "token"])
async def test_leader_survives_numbers_of_a_node_that_cannot_be_stored(site: Site, field: str) -> None:
    node = await site.node()
    site.scheduler()
    await site.add(spec("a"))
    before = await site.view()
    valid = NodeStatus(
        node="faulty",
        boot_id="b",
        seq=1,
        devices=(DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=4, reserved_bytes=4),),
        instances=(instance("a-1", 4, "cpu:0", state=READY if field == "reserved" else SUSPENDED),),
    ).model_dump(mode="json")
    [reported] = valid["instances"]
    for part in (valid["devices"][0], reported, reported["memory"], reported["suspension"]):
        if field in part:
            part[field] = 1 << 63
    await site.mesh.nc.publish(subjects.node_status("faulty"), json.dumps(valid).encode())
    await site.demand("a", 1)
    await site.until(lambda: ready(node, "a"))
    after = await site.view()
    assert after.epoch == before.epoch
    assert [n.node for n in after.nodes] == [node.node]
