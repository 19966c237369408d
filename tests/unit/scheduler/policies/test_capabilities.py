"""Options that the mesh does not support exist in the simulator only."""

from __future__ import annotations

import pytest

from services.scheduler.domain.policy import LIVE, Policy
from services.scheduler.profiles import profile_named
from services.scheduler.settings import SchedulerSettings
from simulator.config import (
    EVERY_CAPABILITY,
    Batching,
    ClusterFile,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    names_of,
)
from simulator.mesh.run import Simulation
from simulator.policies import PROFILES
from simulator.simulate import simulate
from simulator.workloads.request import Request
from simulator.workloads.synthetic import Synthetic, synthetic

NOT_LIVE = frozenset[str]()
NOT_SIMULATED = frozenset({"template"})
WAYS = {"hydraserve": "pipeline", "torpor": "peer", "tangram": "reuse"}
"""The counter of loads, for policies that use the capability."""


def machines(profile: str, capabilities: frozenset[str] = EVERY_CAPABILITY) -> tuple[ClusterFile, list[ModelGroup], list[Request]]:
    """Return a cluster for the profile, with models and requests.

    For pipelines it has four nodes of a slow network, else one node whose devices copy to each
    other and keep evicted weights.
    """
    pipelines = profile == "hydraserve"
    links = LinkSpeeds(remote=1, ssd=1, device=5, peer=None if pipelines else 50)
    group = NodeGroup(
        count=4 if pipelines else 1, devices=1 if pipelines else 2, device_gb=40, dram_gb=0 if pipelines else 200, links=links
    )
    runtime = Runtime.model_validate(
        {
            "capabilities": capabilities,
            "exclusive": profile == "torpor",
            "cache_dram": not pipelines,
            "cache_ssd": not pipelines,
            "in_dram": not pipelines,
        }
    )
    service = Fixed(seconds=1) if profile == "torpor" else Batching(prefill_tokens_per_second=5000, tpot_ms=20, concurrency=8)
    models = [ModelGroup(name="m", copies=5, weights_gb=10, kv_gb=2, service=service, slo_ttft=6, slo_tpot=0.2, keep_alive=2)]
    return ClusterFile(nodes=(group,), runtime=runtime), models, synthetic(Synthetic(0.8, 120, 2.0), names_of(models), 1)


def test_live_and_simulator_only_capabilities_are_disjoint() -> None:
    assert not LIVE & NOT_LIVE
    assert LIVE | NOT_LIVE == EVERY_CAPABILITY | NOT_SIMULATED
    assert Policy().capabilities == LIVE


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_no_profile_enables_simulator_only_capabilities(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THAW_POLICY", profile)
    policy = SchedulerSettings(database_url="postgresql://nowhere/db").rules()
    assert (policy.profile.name, policy.capabilities) == (profile, LIVE)


@pytest.mark.parametrize(("profile", "way"), WAYS.items())
def test_simulator_uses_the_capability_only_if_enabled(profile: str, way: str) -> None:
    found = simulate(*machines(profile), profile_named(profile))
    assert found.loads.get(way, 0) > 0
    without = simulate(*machines(profile, LIVE - {"reuse", "peer_copy", "pipeline"}), profile_named(profile))
    assert way not in without.loads
    assert len(without.served) > 0


@pytest.mark.parametrize(("profile", "way"), WAYS.items())
def test_live_decisions_never_use_simulator_only_options(profile: str, way: str) -> None:
    cluster, models, requests = machines(profile)
    simulation = Simulation(cluster, models, profile_named(profile))
    outcome = simulation.run(requests)
    assert way not in outcome.loads
    assert outcome.lost == 0
    plans = [p for p in simulation.state.plans.values() if p.chosen is not None]
    assert plans
    offered = {c.ready_by for p in plans for c in p.candidates} | {p.chosen.ready_by for p in plans if p.chosen is not None}
    assert not offered & {"pipeline", "peer_copy", "reuse"}
