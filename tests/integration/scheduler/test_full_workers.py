"""Promises of full workers after a change of leaders, with the plans that PostgreSQL has."""

from __future__ import annotations

from services.scheduler.adapters.database import connect, migrate, plain_url
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import Repository
from services.scheduler.domain.events import Recovered
from shared.contracts.models import Slo
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed
from tests.support.divided_models import begin_successor, divided, fail, fill, make, promised, serving, with_token_time
from tests.unit.scheduler.world import World


async def change_leader(w: World, url: str) -> None:
    """Store all decisions so far, and continue with the state that a new leader loads."""
    engine = connect(url)
    try:
        await migrate(engine)
        repository = Repository(engine)
        async with leadership(plain_url(url)) as term:
            for decision in w.decisions:
                await repository.commit(term.epoch, decision.changes)
            w.decisions.clear()
            loaded = await repository.load(term.epoch, w.now)
        loaded.epoch = w.state.epoch + 1
        w.state = loaded
        w.send(Recovered(w.now))
    finally:
        await engine.dispose()


async def test_new_leader_makes_the_promise_of_a_group_again(migrated_url: str) -> None:
    w = divided()
    serving(w)
    before = promised(w)
    assert before
    await change_leader(w, migrated_url)
    assert promised(w) == before
    w.report()
    w.tick()
    assert promised(w) == before


async def test_new_leader_makes_the_promises_of_all_groups_of_a_burst_again(migrated_url: str) -> None:
    w = with_token_time(make(6.0, nodes=4, replicas={"min": 0, "max": 2}, slo=Slo(ttft=6.0, tpot=0.1)), 55.0)
    w.demand("m", 3)
    before = promised(w)
    assert len(before) == 2
    await change_leader(w, migrated_url)
    assert promised(w) == before, "while they start"
    w.report()
    serving(w)
    before = promised(w)
    await change_leader(w, migrated_url)
    assert promised(w) == before, "while they serve"


async def test_new_leader_makes_a_promise_again_that_a_failed_successor_has_returned(migrated_url: str) -> None:
    w = divided()
    serving(w)
    fill(w)
    fail(w, begin_successor(w))
    before = promised(w)
    assert before
    await change_leader(w, migrated_url)
    assert promised(w) == before


async def test_successor_that_fails_after_a_change_of_leaders_returns_the_promise(migrated_url: str) -> None:
    w = divided()
    serving(w)
    fill(w)
    before = promised(w)
    one = begin_successor(w)
    await change_leader(w, migrated_url)
    assert not promised(w), "the successor has its memory"
    one.state, one.error = InstanceState.FAILED, EngineFailed("it ended").body()
    w.report()
    w.finish_stops()
    assert promised(w) == before
