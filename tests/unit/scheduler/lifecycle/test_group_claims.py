"""A group that needs victims: its stages wait for the memory of all their devices together."""

from __future__ import annotations

from services.scheduler.domain.effects import SendStop, SendSuspend
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.node import Capability, InstanceState
from tests.support.fake_node import MIB
from tests.unit.scheduler.staged_models import add_group
from tests.unit.scheduler.world import World

BUDGET = 400 * MIB
"""Room for one model of 324 MiB, or for one stage of some 300 MiB."""


def make(nodes: int = 2, residents: str = "ab") -> World:
    """Return a world of nodes with one device, of which each has one idle model."""
    w = World()
    for n in range(nodes):
        w.node(f"n{n}", BUDGET)
    for name in residents:
        w.model(name)
        w.up(name)
    w.tick(5)
    add_group(w, "m")
    return w


def claimed(w: World) -> list[int]:
    return [booking_of(w.state, n, "cpu:0").claimed_bytes for n in sorted(w.agents)]


def leaving(w: World) -> set[str]:
    return {s.command.instance_id for s in w.sent(SendStop)}


def test_victims_leave_the_devices_of_all_stages_and_the_stages_start_together() -> None:
    w = make()
    a, b = (w.of(name)[0].command.instance_id for name in "ab")
    w.demand("m")
    assert leaving(w) == {a, b}
    assert not w.starts("m"), "no device has the memory yet"
    assert all(claimed(w)), "it is promised on both"
    chosen = w.state.last_plan_of("m").chosen  # type: ignore[union-attr]
    assert chosen is not None
    assert (chosen.ready_by, chosen.clearing, len(chosen.victims)) == ("pipeline", "evict", 2)
    assert "once these have left" in w.state.last_plan_of("m").reason  # type: ignore[union-attr]
    w.agents["n0"].finish_stops()
    w.report()
    assert not w.starts("m"), "one device alone starts no stage"
    assert all(claimed(w))
    w.agents["n1"].finish_stops()
    w.report()
    assert sorted(s.node for s in w.starts("m")) == ["n0", "n1"]
    assert claimed(w) == [0, 0]


def test_free_devices_are_taken_before_an_idle_instance_is_evicted() -> None:
    w = make(nodes=3, residents="a")
    w.demand("m")
    assert len(w.starts("m")) == 2
    assert not leaving(w)


def test_nodes_that_the_models_rules_exclude_hide_no_others() -> None:
    """Devices to be cleared are examined one by one: only so many of them."""
    w = World()
    for n in range(12):
        w.node(f"n{n:02}", BUDGET)
        w.agents[f"n{n:02}"].labels = {"zone": "b" if n >= 10 else "a"}
    for n in range(12):
        w.model(f"r{n}", placement={"devices": (f"n{n:02}/*",)})
        w.up(f"r{n}")
        w.tick(1)
    add_group(w, "m", placement={"labels": {"zone": "b"}})
    w.demand("m")
    assert leaving(w) == {w.of(f"r{n}")[0].command.instance_id for n in (10, 11)}


def test_refusing_victim_releases_the_memory_of_all_stages() -> None:
    w = make()
    w.of("b")[0].active = 1  # since its last report
    w.demand("m")
    assert not w.starts("m")
    assert not w.state.later_stages
    assert claimed(w) == [0, 0]
    assert "is serving" in w.state.unschedulable["m"].reason
    w.of("b")[0].active, w.of("b")[0].idle_since = 0, w.now
    w.tick(w.policy.busy_cooldown_s + 1)
    w.demand("m")
    w.finish_stops()
    assert len(w.starts("m")) == 2


def test_group_takes_another_device_in_place_of_that_of_a_busy_victim() -> None:
    w = make(nodes=3, residents="abc")
    w.of("a")[0].active = 1
    w.demand("m")
    w.finish_stops()
    assert sorted(s.node for s in w.starts("m")) == sorted(
        n for n, agent in w.agents.items() if not any(r.active for r in agent.instances.values())
    )


def test_claims_of_groups_with_devices_in_common_all_start() -> None:
    w = World()
    for n in range(3):
        w.node(f"n{n}", 2 * BUDGET)
    for name in "abcdef":
        w.model(name)
        w.up(name)
    w.tick(5)
    for name in ("x", "y", "z"):
        add_group(w, name)
        w.demand(name)
    assert not any(w.starts(name) for name in ("x", "y", "z"))
    for _ in range(3):
        for node in ("n2", "n0", "n1"):
            w.agents[node].finish_stops()
            w.report(node)
    assert [len(w.starts(name)) for name in ("x", "y", "z")] == [2, 2, 2]


def test_claim_leaves_the_memory_that_an_older_group_waits_for() -> None:
    w = make(nodes=2, residents="ab")
    w.demand("m")
    w.model("small", weights=20 * MIB)
    w.agents["n0"].finish_stops()
    w.report("n0")
    w.demand("small")
    assert not w.starts("small"), "the bytes that are free on n0 are promised"
    w.agents["n1"].finish_stops()
    w.report("n1")
    assert len(w.starts("m")) == 2


def test_demand_that_ends_gives_up_the_memory_of_all_stages() -> None:
    w = make()
    w.demand("m")
    assert all(claimed(w))
    w.demand("m", 0)
    assert claimed(w) == [0, 0]
    assert not w.state.later_stages


def test_silent_node_of_a_waiting_stage_is_no_failure_of_the_model() -> None:
    w = make()
    w.demand("m")
    lost = next(x.node for x in w.state.later_stages.values())
    agent = w.agents.pop(lost)
    w.now += w.policy.node_lost_after_s + 1
    w.demand("m")
    w.tick()
    assert not w.state.later_stages
    assert "m" not in w.state.failures
    w.agents[lost] = agent
    w.finish_stops()
    w.tick(1)
    assert len(w.starts("m")) == 2


def test_new_leader_places_a_waiting_group_again() -> None:
    w = make()
    w.demand("m")
    w.change_leader()
    w.report()
    w.demand("m")
    w.finish_stops()
    w.tick(1)
    assert len(w.starts("m")) == 2
    assert {s.command.reserve_bytes for s in w.starts("m")} == {x.reserve_bytes for x in w.state.later_stages.values()}


def test_idle_group_is_evicted_for_memory_of_a_later_stages_device() -> None:
    w = make(residents="")
    w.demand("m")
    w.get_ready("m")
    w.demand("m", 0)
    [first] = w.state.instances
    [later] = w.state.later_stages.values()
    assert booking_of(w.state, later.node, "cpu:0").idle_bytes == later.reserve_bytes
    w.tick(5)
    w.model("a", placement={"devices": [f"{later.node}/*"]})
    w.demand("a")
    assert leaving(w) == {first}
    b = booking_of(w.state, later.node, "cpu:0")
    assert b.leaving_bytes == later.reserve_bytes
    assert not w.starts("a")
    w.finish_stops()
    assert later.stage_id in leaving(w), "the later stage follows the first one"
    assert not w.starts("a"), "its own process still has the memory"
    w.finish_stops()
    assert [s.node for s in w.starts("a")] == [later.node]


def test_victims_of_each_device_free_what_is_missing_there() -> None:
    """A victim that keeps too much of its device when suspended is stopped."""
    w = make()
    for agent in w.agents.values():
        agent.capabilities, agent.snapshot_budget = (Capability(name="suspend:cpu", available=True),), 10_000 * MIB
    a, b = (w.of(name)[0] for name in "ab")
    w.can_suspend(a, left=150 * MIB)
    w.can_suspend(b)
    w.demand("m")
    assert [s.command.instance_id for s in w.sent(SendSuspend)] == [b.command.instance_id]
    assert leaving(w) == {a.command.instance_id}
    w.finish_stops()
    assert len(w.starts("m")) == 2
    assert b.state is InstanceState.SUSPENDED
