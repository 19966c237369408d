"""One simulation run, from the first arrival to the last response."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.domain.policies.port import Profile
from simulator.config import ClusterFile, ModelGroup
from simulator.controller import Controller
from simulator.failures import schedule
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.world import World


def simulate(
    cluster: ClusterFile, models: Sequence[ModelGroup], requests: Sequence[Request], profile: Profile, seed: int = 0
) -> Outcome:
    """Simulate `requests`, ordered by arrival. Equal arguments give equal outcomes."""
    world = World(cluster, models, profile, seed)
    controller = Controller(world)
    schedule(world, controller)
    return controller.run(requests)
