"""Ordered migrations that no migrator works on."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.domain.effects import CancelMigration, OrderMigration
from services.scheduler.domain.events import MigrationRequested, MigrationUpdated
from services.scheduler.domain.migration.orders import UNCLAIMED_S
from shared.contracts.migration import BEAT_S, LEASE_S, MigrationRecord
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

READY = InstanceState.READY


@pytest.fixture
def world() -> World:
    """Create two nodes, and models that serve on the first one."""
    world = World()
    world.node("n1", budget=5000 * MIB)
    for name in ("a", "b"):
        world.model(name, engine="vllm", memory=600 * MIB, keep_alive=-1)
        world.up(name).active = 2
    world.node("n2", budget=5000 * MIB)
    return world


def order(world: World, model: str = "a") -> MigrationRecord:
    """Order that the model's requests move to n2; the requester is named as the model."""
    (source,) = world.of(model, READY)
    world.send(MigrationRequested(world.now, model, source.command.instance_id, node="n2"))
    world.get_ready(model)
    return world.sent(OrderMigration)[-1].record


def update(world: World, record: MigrationRecord, **fields: Any) -> MigrationRecord:
    """Let the bucket have a change of the record."""
    changed = record.model_copy(update=fields)
    world.send(MigrationUpdated(world.now, changed))
    return changed


def claim(world: World, record: MigrationRecord, owner: str = "m") -> MigrationRecord:
    return update(world, record, owner=owner, state="preparing", beats=1)


def cancelled(world: World) -> list[MigrationRecord]:
    return [e.record for e in world.sent(CancelMigration)]


def live(world: World) -> list[str]:
    return [i.node for i in world.state.live_instances(world.state.models["a"])]


def test_migration_that_no_migrator_claims_is_cancelled(world: World) -> None:
    record = order(world)
    world.tick(5.0)
    assert not cancelled(world)
    world.tick(6.0)
    world.tick(6.0)
    (off,) = world.sent(CancelMigration)
    assert off.record == record
    update(world, record, state="cancelled", error=off.error)
    assert "no migrator" in world.answer("a").migrations[0].error.message
    assert [s.command.instance_id for s in world.stops("a")] == [record.instance_id], "the source serves on"
    assert not world.state.migrations


def test_claimed_migration_without_signs_of_life_is_cancelled(world: World) -> None:
    record = claim(world, order(world))
    for beat in range(2, 30):
        world.tick(BEAT_S)
        record = update(world, record, beats=beat)
    world.tick(UNCLAIMED_S)
    assert not cancelled(world)
    world.tick(LEASE_S + 0.1)
    assert cancelled(world) == [record]
    update(world, record, state="cancelled")
    assert live(world) == ["n1"]


def test_migration_that_its_migrator_gave_back_is_cancelled(world: World) -> None:
    record = update(world, claim(world, order(world)), owner="", beats=2)
    world.tick(UNCLAIMED_S)
    assert not cancelled(world)
    world.tick(0.1)
    assert cancelled(world) == [record]


def test_cancellation_that_another_migrator_forestalled_is_repeated(world: World) -> None:
    record = order(world)
    world.tick(UNCLAIMED_S + 0.1)
    assert cancelled(world) == [record]
    claimed = claim(world, record)
    world.tick(UNCLAIMED_S)
    assert cancelled(world) == [record]
    world.tick(LEASE_S + 0.1)
    assert cancelled(world) == [record, claimed]


def test_order_waits_while_a_migrator_is_busy_with_another_one(world: World) -> None:
    """Each migrator moves the requests of one instance at a time."""
    busy, waiting = claim(world, order(world, "a")), order(world, "b")
    for beat in range(2, 4 * int(UNCLAIMED_S)):
        world.tick(BEAT_S)
        busy = update(world, busy, beats=beat)
    update(world, busy, state="done")
    world.tick(UNCLAIMED_S)
    assert not cancelled(world)
    world.tick(0.1)
    assert cancelled(world) == [waiting]


@pytest.mark.parametrize("owner", ["killed", "busy"])
def test_order_of_a_silent_owner_waits_while_a_migrator_is_busy(world: World, owner: str) -> None:
    """The busy migrator continues it later, also if it once claimed it itself and lost it."""
    silent, busy = claim(world, order(world, "a"), owner), claim(world, order(world, "b"), "busy")
    for beat in range(2, 4 * int(UNCLAIMED_S)):
        world.tick(BEAT_S)
        busy = update(world, busy, beats=beat)
    update(world, busy, state="done")
    world.tick(UNCLAIMED_S + LEASE_S)
    assert not cancelled(world)
    world.tick(0.1)
    assert cancelled(world) == [silent]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_cancellation_is_sent_again_while_the_order_is_unchanged(world: World, *, is_claimed: bool) -> None:
    """A bucket that does not answer drops it: else the source could not be moved for an hour."""
    record, limit_s = order(world), UNCLAIMED_S
    if is_claimed:
        record, limit_s = claim(world, record), UNCLAIMED_S + LEASE_S
    world.tick(limit_s + 0.1)
    world.tick(limit_s)
    assert cancelled(world) == [record]
    world.tick(0.1)
    assert cancelled(world) == [record, record]
    claim(world, record, "other")
    world.tick(UNCLAIMED_S + LEASE_S)
    assert cancelled(world) == [record, record]


@pytest.mark.parametrize("is_claimed", [False, True])
def test_signs_of_life_are_not_missed_while_the_leader_is_disconnected(world: World, *, is_claimed: bool) -> None:
    record = order(world)
    if is_claimed:
        record = claim(world, record)
    world.tick(60.0, nodes_report=False, connected_since=None)
    back_at = world.now
    world.tick(UNCLAIMED_S, connected_since=back_at)
    assert not cancelled(world)
    world.tick(LEASE_S + 0.1, connected_since=back_at)
    assert cancelled(world) == [record]


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_clock_of_the_last_leader_does_not_count(world: World, ahead_s: float) -> None:
    record = order(world)
    record = record.model_copy(update={"created": world.now + ahead_s})
    world.state.migrations.clear()
    world.change_leader()
    update(world, record)
    world.tick(UNCLAIMED_S)
    assert not cancelled(world)
    world.tick(0.1)
    assert cancelled(world) == [record]
