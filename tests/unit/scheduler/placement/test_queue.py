"""Decisions about several requests at once, and fairness between models."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.events import DemandBatch, DemandReceived, LoaderStatusReceived, Tick
from services.scheduler.domain.placement.queue import EXAMINED
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.indexes import with_keep_alive
from services.scheduler.loop import merge_demand
from shared.contracts.demand import Demand
from shared.contracts.loader import LoaderStatus, SegmentStatus
from shared.contracts.node import InstanceState
from simulator.policies import PROFILES
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ONE = 400 * MIB
"""Room for one model of 324 MiB."""


def holds(w: World, node: str, *models: str) -> None:
    held = [
        SegmentStatus(weights_id=f"rev-/m/{m}", model=m, segment="s", total_bytes=1, loaded_bytes=1, holders=()) for m in models
    ]
    w.send(LoaderStatusReceived(w.now, LoaderStatus(node=node, boot_id="b", segments=tuple(held), bytes_per_second=1e8)))


def demands(w: World, *models: str) -> None:
    received = tuple(DemandReceived(w.now, Demand(gateway="g", model=m, waiting=1), f"w-{m}") for m in models)
    w.send(DemandBatch(w.now, received))


def test_model_with_one_suitable_node_is_placed_first() -> None:
    """A model with one suitable node goes first.

    Both models are fastest on the same node; the one whose weights are on both nodes can use the
    other.
    """
    w = World()
    for name in ("fast", "slow"):
        w.node(name, ONE)
    w.model("anywhere")
    w.model("picky")
    holds(w, "fast", "anywhere", "picky")
    holds(w, "slow", "anywhere")
    demands(w, "anywhere", "picky")
    assert {s.command.card.name: s.node for s in w.starts("anywhere") + w.starts("picky")} == {"picky": "fast", "anywhere": "slow"}


def test_every_request_is_answered() -> None:
    w = World()
    w.node("n", ONE)
    for name in ("a", "b"):
        w.model(name)
    demands(w, "a", "b", "unknown")
    assert w.answer("w-a").outlook == "starting"
    assert w.answer("w-b").outlook == "waiting"
    assert w.answer("w-unknown").code == "model_not_found"


def waits_for(profile: str, asks: Callable[[int], Iterable[str]], places: int, others: tuple[str, ...]) -> tuple[float, Policy]:
    """Return seconds until a model of low priority is served under constant demand.

    Args:
        profile: The scheduler's profile.
        asks: Returns the models that are requested in each half second.
        places: Number of nodes, each with room for one instance.
        others: Models of a higher priority.
    """
    policy = Policy(profile=PROFILES[profile], preempt_after_s=5.0, starve_after_s=20.0, drain_timeout_s=1.0)
    w = World(policy=policy)
    with_keep_alive(w.state, policy.profile.keep)
    for n in range(places):
        w.node(f"n{n}", ONE)
    w.model("low", priority=-10)
    for name in others:
        w.model(name, priority=10)
    began = w.now
    for step in range(100):
        w.now += 0.5
        for agent in w.agents.values():
            for r in agent.instances.values():
                if r.state is InstanceState.LOADING:
                    r.state = InstanceState.READY
                r.active = int(r.state is InstanceState.READY)
            agent.finish_stops()
        w.tick()
        demands(w, *asks(step), "low")
        if w.of("low", InstanceState.READY):
            return w.now - began, policy
    raise AssertionError(w.state.unschedulable)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_no_model_starves_under_any_profile(profile: str) -> None:
    """No model starves under any profile.

    Others keep the only device busy; the model is served within the bound.
    """
    served, policy = waits_for(profile, lambda _: ("high1", "high2"), 1, ("high1", "high2"))
    assert served <= policy.starve_after_s + 5


@settings(max_examples=15)
@given(st.integers(1, 3), st.lists(st.sets(st.sampled_from([f"high{n}" for n in range(5)])), min_size=1, max_size=8))
def test_no_model_starves_under_demand_for_other_models(places: int, turns: list[set[str]]) -> None:
    """No model starves under any demand of others.

    Only models that have waited as long go before it, each for one turn: until it may be preempted
    and is gone.
    """
    others = tuple(sorted(set().union(*turns)))
    served, policy = waits_for("thaw", lambda step: sorted(turns[step % len(turns)]), places, others)
    turn = policy.min_active_s + policy.drain_timeout_s + 1.0
    assert served <= policy.starve_after_s + turn * (1 + len(others))


def test_small_model_behind_many_large_ones_is_placed_once_it_has_room() -> None:
    """It is examined within a second, although those before it in the order find no room."""
    w = World()
    w.node("n", 900 * MIB)
    for name in ("a", "b"):
        w.model(name)
        w.up(name).active = 1
    w.report()
    large = [f"large{n}" for n in range(2 * EXAMINED)]
    for name in large:
        w.model(name, 500 * MIB, priority=10)
    w.model("small")
    for name in (*large, "small"):
        w.demand(name)
    assert set(w.state.unschedulable) == {*large, "small"}
    w.of("a")[0].active = 0
    for _ in range(4):
        w.tick(0.25)
    assert not w.starts("small"), "`a` has just become ready"
    w.now += w.policy.min_active_s
    for _ in range(4):
        w.tick(0.25)
        w.finish_stops()
    assert w.starts("small")
    assert not any(w.starts(name) for name in large)


def test_first_of_many_waiting_models_takes_the_room() -> None:
    w = World()
    w.node("n", ONE)
    w.model("a")
    w.up("a").active = 1
    w.report()
    names = [f"m{n}" for n in range(2 * EXAMINED)]
    for name in names:
        w.model(name, priority=10 if name == names[-1] else 0)
        w.demand(name)
    w.of("a")[0].active = 0
    w.tick(w.policy.min_active_s + 1)
    w.finish_stops()
    w.tick(0.25)
    assert [name for name in names if w.starts(name)] == [names[-1]]


def test_only_demand_in_a_row_is_decided_together() -> None:
    a, b, c = (DemandReceived(1.0, Demand(gateway="g", model=m, waiting=1), m) for m in "abc")
    tick = Tick(1.0)
    assert merge_demand([a, b, tick, c]) == [DemandBatch(1.0, (a, b)), tick, c]
    assert merge_demand([tick]) == [tick]
