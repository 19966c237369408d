"""More devices than a shortlist has."""

from __future__ import annotations

from services.scheduler.domain.events import LoaderStatusReceived
from services.scheduler.domain.placement.shortlist import FITTING, SHORTLIST_SIZE
from shared.contracts.loader import LoaderStatus, SegmentStatus
from shared.contracts.node import InstanceState
from tests.support.fake_node import MIB
from tests.support.sizes import size
from tests.unit.scheduler.world import World

MANY = size(20, 48)
LATE = f"n{MANY - 4}", f"n{MANY - 3}"
"""Nodes near the end of the order in which the scheduler tries nodes."""
ONE_MODEL = 400 * MIB
"""Size of a device with room for one model of 324 MiB."""


def loader(w: World, node: str, *, speed: float | None = None, revision: str | None = None) -> None:
    """Report a node's loader, with its bandwidth or with the weights that it has cached."""
    cached = (
        [SegmentStatus(weights_id=revision, model="x", segment="s", total_bytes=1, loaded_bytes=1, holders=())] if revision else []
    )
    w.send(LoaderStatusReceived(w.now, LoaderStatus(node=node, boot_id="b", segments=tuple(cached), bytes_per_second=speed)))


def many() -> World:
    """Return a cluster of idle nodes."""
    w = World()
    for n in range(MANY):
        w.node(f"n{n:02}", ONE_MODEL)
    return w


def full() -> World:
    """Return a cluster with an idle model on every device, on `n07` for the longest time."""
    w = many()
    for n in range(MANY):
        w.model(f"m{n:02}", keep_alive=-1)
        w.up(f"m{n:02}")
    w.model("new")
    first = next(r for r in w.agents["n07"].instances.values())
    first.idle_since = w.now - 5000
    w.tick(5)
    return w


def test_fastest_start_among_many_nodes_is_found() -> None:
    w = many()
    w.model("a")
    w.model("b")
    loader(w, LATE[0], speed=9e9)
    loader(w, LATE[1], revision="rev-/m/b")
    w.demand("a")
    w.demand("b")
    assert [s.node for s in w.starts("a") + w.starts("b")] == [*LATE]
    plan = w.state.last_plan_of("a")
    assert plan is not None
    assert len(plan.candidates) == FITTING


def test_cached_weights_of_another_revision_are_ignored() -> None:
    w = many()
    w.model("a")
    loader(w, LATE[0], revision="rev-/m/a of yesterday")
    w.demand("a")
    assert w.starts("a")[0].node == "n00"


def test_longest_idle_of_many_instances_is_evicted() -> None:
    w = full()
    w.demand("new")
    assert [s.node for s in w.stops("m07")] == ["n07"]


def test_only_evictable_instance_is_found_among_many() -> None:
    w = full()
    for n in range(MANY - 1):
        w.model(f"m{n:02}", keep_alive=-1, replicas={"min": 1, "max": 1})
    w.demand("new")
    assert len(w.stops(f"m{MANY - 1}")) == 1


def test_waiting_reason_summarizes_many_devices() -> None:
    w = full()
    for agent in w.agents.values():
        for r in agent.instances.values():
            r.active = int(r.state is InstanceState.READY)
    w.tick(1)
    noted = w.demand("new")
    assert noted.outlook == "waiting"
    assert noted.reason.count("is serving") == SHORTLIST_SIZE
    assert f"and {MANY - SHORTLIST_SIZE} more devices" in noted.reason
