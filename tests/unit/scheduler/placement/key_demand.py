"""Demand of API keys, and a world with one device that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.scheduler.domain.events import DemandBatch, DemandReceived
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.entities import Instance
from shared.contracts.demand import Demand, KeyDemand
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

ONE = 400 * MIB
"""Room for one model of 324 MiB."""


def wait(w: World, wanted: Mapping[str, Sequence[KeyDemand]]) -> None:
    """One gateway reports the waiting requests of models, by model."""
    w.send(DemandBatch(w.now, tuple(demand_of(model, *keys, now=w.now) for model, keys in wanted.items())))


def demand_of(model: str, *keys: KeyDemand, now: float = 0.0) -> DemandReceived:
    return DemandReceived(now, Demand(gateway="g", model=model, waiting=sum(k.waiting for k in keys), keys=keys), f"w-{model}")


def key(flow: str, waiting: int = 1, weight: float = 1.0, priority: int = 0) -> KeyDemand:
    return KeyDemand(flow=flow, waiting=waiting, weight=weight, priority=priority)


def starting(model: str) -> Instance:
    """Return an instance on a whole unknown device."""
    return Instance(f"i-{model}", "p", model, 1, "r", "n", ("cpu:0",), 1, 1, 0, 0.0, 0.0)


def world(*models: str, preempt_after_s: float = 15.0, starve_after_s: float = 60.0) -> World:
    w = World(policy=Policy(preempt_after_s=preempt_after_s, starve_after_s=starve_after_s))
    w.node("n", ONE)
    for name in models:
        w.model(name)
    return w
