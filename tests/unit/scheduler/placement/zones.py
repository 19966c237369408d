"""A world of nodes in zones, and models with placement rules."""

from __future__ import annotations

from typing import Any

from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ZONES = {"n1": "a", "n2": "b", "n3": "b"}


def world(nodes: dict[str, str] | None = None) -> World:
    w = World()
    for name, zone in (nodes or ZONES).items():
        agent = w.node(name, 2000 * MIB)
        agent.labels = {"zone": zone}
        w.report(name)
    return w


def placed(w: World, name: str, **placement: Any) -> str:
    """Return the node where a model with these rules starts; empty if it waits."""
    w.model(name, placement=placement)
    w.demand(name)
    return next((s.node for s in w.starts(name)), "")
