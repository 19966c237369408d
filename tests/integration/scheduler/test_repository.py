"""The scheduler's tables on real PostgreSQL: writes, reads by a new leader, and upgrades."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import pytest
from alembic import command
from sqlalchemy import text

from services.scheduler.adapters.database import NEWEST_REVISION, alembic_config, connect, migrate, open_connection, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.state.changes import Drop, Put, Traced
from services.scheduler.domain.state.entities import Device, Entity, Instance, Model, Node
from services.scheduler.domain.state.measurements import (
    AppliedReport,
    Estimate,
    HourCounts,
    MeasuredMemory,
    MemoryProfile,
    SloCounts,
)
from services.scheduler.domain.state.pulls import Pull
from services.scheduler.domain.state.volatile import LoaderPresence
from shared.contracts.admin import ModelPulled
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus, SegmentStatus
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.plans import Candidate, PlanRecord
from shared.errors import PullCancelled
from tests.support.fake_node import model_info

COUNT = 2500
"""Rows of 20 columns: more values than one PostgreSQL statement accepts."""


def card(name: str) -> ModelCard:
    spec = ModelSpec(name=name, source=f"/m/{name}")
    return ModelCard(spec=spec, info=model_info(spec.source, 100), created=0)


async def test_transaction_accepts_any_number_of_rows(migrated_url: str) -> None:
    engine = connect(migrated_url)
    try:
        await migrate(engine)
        repository = Repository(engine)
        nodes = [Node(f"n{n}", devices=(Device("cuda:0", "cuda", "", 10),)) for n in range(COUNT)]
        instances = [
            Instance(f"i{n}", f"p{n}", "m", 1, "r", f"n{n}", ("cuda:0",), n, 1, 1, requested_at=1.0, planned_at=2.0)
            for n in range(COUNT)
        ]
        async with leadership(plain_url(migrated_url)) as term:
            first: list[Entity] = [*nodes, *instances]
            await repository.commit(term.epoch, [Put(e) for e in first])
            later = [replace(i, leave_reason="again") for i in instances]
            await repository.commit(term.epoch, [Put(i) for i in later])
            state = await repository.load(term.epoch, now=10.0)
        assert state.instances == {i.instance_id: i for i in later}
        assert state.nodes == {n.name: n for n in nodes}
    finally:
        await engine.dispose()


async def test_pulls_survive_a_leader_change_with_their_answers(migrated_url: str) -> None:
    engine = connect(migrated_url)
    running = Pull("a/m", "n1", "dram", "r", since=8.0, requests=("q1", "q2"), token=5 << 32, sent_at=20.0)
    answered = Pull("m", "n1", "ssd", "r", since=8.0, ended_at=9.0, answer=PullCancelled("gone").body())
    pulled = replace(answered, node="n2", answer=ModelPulled(name="m", node="n2", tier="ssd", tiers=("ssd",), nbytes=7))
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(running), Put(answered), Put(pulled)])
            state = await repository.load(term.epoch, now=10.0)
            clipped = replace(running, sent_at=10.0)
            assert state.pulls == {p.key: p for p in (clipped, answered, pulled)}
            await repository.commit(term.epoch, [Drop(Pull, running.key), Put(replace(pulled, ended_at=9.5))])
            state = await repository.load(term.epoch, now=10.0)
            assert state.pulls == {p.key: p for p in (answered, replace(pulled, ended_at=9.5))}
    finally:
        await engine.dispose()


async def test_drain_is_not_prolonged_by_a_leader_whose_clock_was_ahead(migrated_url: str) -> None:
    engine = connect(migrated_url)
    nodes = [Node("past", drain_since=3.0), Node("future", drain_since=3_600.0), Node("none")]
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(n) for n in nodes])
            state = await repository.load(term.epoch, now=10.0)
        assert {n.name: n.drain_since for n in state.nodes.values()} == {"past": 3.0, "future": 10.0, "none": None}
    finally:
        await engine.dispose()


async def test_estimates_objectives_and_loader_statuses_survive_a_leader_change(migrated_url: str) -> None:
    engine = connect(migrated_url)
    learned = [
        Estimate("a", "n1", {"init": Parameter(120.0, 5.0, 3), "bandwidth:ssd": Parameter(2e9, 1e8, 3)}),
        Estimate("", "n1", {"leaving": Parameter(80.0, 2.0, 1)}),
        Estimate("gone", "n1", {"init": Parameter(1.0)}),
    ]
    profile = MeasuredMemory("a", 3, "vllm", {"cpu": MemoryProfile(need_bytes=2 << 30, load_bytes=9, runtime_bytes=1 << 30)})
    status = LoaderStatus(
        node="n1",
        boot_id="b",
        segments=(
            SegmentStatus(
                weights_id="r1", model="a", segment="s", total_bytes=5, loaded_bytes=5, holders=(), on_devices={"cuda:0": 4}
            ),
            SegmentStatus(weights_id="half", model="b", segment="t", total_bytes=5, loaded_bytes=2, holders=()),
        ),
        cached=(CachedModel(weights_id="r2", tier="ssd", nbytes=7),),
        links=(LinkStatus(link="ssd:nvme0n1", bytes_per_second=3e9, queued_bytes=10, loads=1, finish_ms=4.0),),
    )
    presence = LoaderPresence("n1", 9.0, status)
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            counts = SloCounts("a", (HourCounts(400_000, 5, 4), HourCounts(400_001, 1, 0)), (AppliedReport("g", 7, 9.5),))
            entities: list[Entity] = [Node("n1"), Model(card("a")), *learned, profile, counts]
            await repository.commit(term.epoch, [Put(e) for e in entities])
            await repository.keep_loaders(term.epoch, [presence])
            await repository.keep_loaders(term.epoch, [presence])
            newer = replace(learned[0], parameters={"init": Parameter(100.0, 4.0, 4)})
            await repository.commit(term.epoch, [Put(newer), Drop(Estimate, learned[1].key)])
            await repository.prune(term.epoch, now=10.0)
            state = await repository.load(term.epoch, now=10.0)
            assert state.estimates == {newer.key: replace(newer, parameters=learned[0].parameters | newer.parameters)}
            assert state.measured == {"a": profile}
            assert state.slo_counts == {"a": counts}
            assert (state.in_memory.get("r1"), state.in_memory.get("r2"), state.on_disk.get("r2")) == (("n1",), None, ("n1",))
            assert not state.is_loader_alive("n1", 20.0, 3.0)
            assert [link.link for link in state.loaders["n1"].status.links] == ["ssd:nvme0n1"]
            assert not state.links_busy_until, "queues of the previous leader's time"
            await repository.commit(term.epoch, [Drop(Node, "n1"), Drop(MeasuredMemory, "a")])
            assert not (await repository.load(term.epoch, now=10.0)).measured
            await repository.prune(term.epoch, now=10.0)
            assert not (await repository.load(term.epoch, now=10.0)).loaders
    finally:
        await engine.dispose()


async def test_plan_is_stored_with_its_prediction_and_error(migrated_url: str) -> None:
    engine = connect(migrated_url)
    chosen = Candidate(node="n1", device_ids=("cuda:0",), way="load", predicted_ms=100.0, predicted={"load": 100.0}, took_ms=130.0)
    plan = PlanRecord(
        plan_id="p1", model="a", created=5.0, trigger="demand", way="load", chosen=chosen, candidates=(chosen,), instance_id="i1"
    )
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(plan), Traced("p1", "i1", "00-a-b-01")])
            kept = await repository.plan_of_instance("i1")
        assert kept == plan.model_copy(update={"traceparent": "00-a-b-01"})
        async with engine.connect() as connection:
            row = (await connection.execute(text("SELECT predicted_ms, error_ms FROM plans"))).one()
        assert tuple(row) == (100.0, 30.0)
    finally:
        await engine.dispose()


async def test_writable_server_is_used_at_any_position_of_the_list(database_url: str, new_port: Callable[[], int]) -> None:
    server = urlsplit(plain_url(database_url))
    host = f"{server.hostname}:{server.port}"
    unused = f"127.0.0.1:{new_port()}"

    def listing(*hosts: str) -> str:
        return urlunsplit(server._replace(netloc=f"{server.username}@{','.join(hosts)}"))

    for url in (listing(host), listing(unused, host), listing(host, unused)):
        connection = await open_connection(url)
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()
    with pytest.raises(OSError, match="Connect call failed"):
        await open_connection(listing(unused, unused))
    with pytest.raises(ConnectionRefusedError, match="until it is promoted"):
        await open_connection(listing(unused, host), server_settings={"default_transaction_read_only": "on"})


async def test_a_schema_that_is_up_to_date_is_not_upgraded(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = connect(database_url)
    try:
        await migrate(engine)

        def fail(_: object) -> None:
            raise AssertionError("upgraded again")

        monkeypatch.setattr("services.scheduler.adapters.database._upgrade", fail)
        await migrate(engine)
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
        with pytest.raises(AssertionError, match="upgraded again"):
            await migrate(engine)
    finally:
        await engine.dispose()


async def test_schedulers_that_start_at_once_upgrade_one_after_the_other(database_url: str) -> None:
    engines = [connect(database_url) for _ in range(3)]
    try:
        await asyncio.gather(*map(migrate, engines))
        async with engines[0].connect() as connection:
            assert await connection.scalar(text("SELECT version_num FROM alembic_version")) == NEWEST_REVISION
    finally:
        for engine in engines:
            await engine.dispose()


async def test_models_of_an_earlier_version_keep_a_process_of_their_own(migrated_url: str) -> None:
    """That version stored `shared` for each model, without effect."""
    engine = connect(migrated_url)
    earlier = card("a").model_copy(update={"spec": ModelSpec(name="a", source="/m/a", isolation="shared")})
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(Model(earlier))])
            async with engine.begin() as connection:
                await connection.run_sync(lambda sync: command.downgrade(alembic_config(sync), "0004"))
            await migrate(engine)
            state = await repository.load(term.epoch, now=10.0)
        assert state.models["a"].card.spec.isolation == "dedicated"
    finally:
        await engine.dispose()


async def test_unreadable_rows_are_set_aside_and_the_others_loaded(migrated_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged row, or one of a newer version, must not end every term."""
    engine = connect(migrated_url)
    plans = [PlanRecord(plan_id=f"p{n}", model="a", created=float(n), trigger="demand", way="load") for n in range(3)]
    instances = [
        Instance(f"i{n}", f"p{n}", "a", 1, "r", "n1", ("cuda:0",), n, 1, 1, requested_at=1.0, planned_at=2.0) for n in range(2)
    ]
    profile = MeasuredMemory("a", 1, "vllm", {"cpu": MemoryProfile(need_bytes=1)})
    pull = Pull("a", "n1", "ssd", "r", since=8.0)
    counts = SloCounts("a", (HourCounts(1, 2, 2),))
    good: list[Entity] = [Model(card("a")), Node("n1"), instances[0], plans[0], plans[2]]
    damaged: list[Entity] = [Model(card("b")), instances[1], plans[1], profile, pull, counts]
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(migrated_url)) as term:
            await repository.commit(term.epoch, [Put(e) for e in (*good, *damaged)])
            async with engine.begin() as connection:
                for damage in (
                    "UPDATE plans SET way = 'teleport' WHERE plan_id = 'p1'",
                    "UPDATE models SET card = '{}' WHERE name = 'b'",
                    "UPDATE instances SET state = 'dreaming' WHERE instance_id = 'i1'",
                    "UPDATE profiles SET by_kind = '[]'",
                    "UPDATE pulls SET requests = '7'",
                    "UPDATE objectives SET hours = '[[1]]'",
                ):
                    await connection.execute(text(damage))
            state = await repository.load(term.epoch, now=10.0)
            assert await repository.plan("p1") is None
            assert await repository.plan("p2") == plans[2]
        assert (set(state.models), set(state.nodes), set(state.instances)) == ({"a"}, {"n1"}, {"i0"})
        assert list(state.plans) == ["p0", "p2"]
        assert [len(kept) for kept in (state.measured, state.pulls, state.slo_counts)] == [0, 0, 0]
        logged = [r for r in caplog.records if r.message.startswith("failed to read stored rows")]
        found = {vars(r)["table"]: vars(r)["keys"] for r in logged}
        assert (found["plans"], found["models"], found["instances"]) == (["p1"], ["b"], ["i1"])
        assert all(vars(r)["error"] for r in logged)
    finally:
        await engine.dispose()
