"""Gateways' demand: when it counts as lost."""

from __future__ import annotations

from services.scheduler.domain.events import Tick
from tests.unit.scheduler.world import World


def test_tick_that_waited_for_its_decision_takes_no_demand_for_lost(w: World) -> None:
    """The messages with which gateways repeat their demand wait behind it."""
    w.node()
    w.model("a")
    w.demand("a")
    due = Tick(w.now)
    w.now += w.policy.demand_lost_after_s + 1
    w.send(due)
    assert w.state.waiting_count("a") == 1
    assert not w.stops("a")
    w.send(Tick(w.now))
    assert w.state.waiting_count("a") == 0
