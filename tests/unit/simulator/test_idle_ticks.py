"""Ticks that change nothing are not decided: all results are as if they were."""

from __future__ import annotations

from typing import Any

import pytest

import simulator.mesh.run
from services.scheduler.domain.decide import Decision, decide
from services.scheduler.domain.effects import Effect, SendExpectation, SendPrefetch
from services.scheduler.domain.events import Event
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.profiles import profile_named
from simulator.config import Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup, names_of
from simulator.mesh.idle_ticks import IdleTicks
from simulator.mesh.run import Simulation
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.workloads.synthetic import Synthetic, synthetic

SERVICE = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=2)
USUAL = ModelGroup(name="m", copies=4, weights_gb=10, kv_gb=4, service=SERVICE, slo_ttft=10, keep_alive=40, replicas_max=2)
KEPT = USUAL.model_copy(update={"name": "kept", "copies": 1, "replicas_min": 1, "weights_gb": 3.0})
REGULAR = USUAL.model_copy(update={"name": "regular", "copies": 1, "keep_alive": 0.0})
MODELS = [USUAL, KEPT, REGULAR]
HOUR_S = 3600.0


def cluster(memory: str) -> ClusterFile:
    links = LinkSpeeds(remote=1, ssd=5, device=20, peer=40)
    node = NodeGroup.model_validate(
        {"count": 2, "devices": 2, "device_gb": 20, "dram_gb": 24, "ssd_gb": 40, "links": links, "memory": memory}
    )
    startup = Startup(container_s=1, init_s=0.5, leave_s=0.3, restore_s=0.2)
    return ClusterFile(nodes=(node,), runtime=Runtime(startup=startup, decision_ms=3, gateway_ms=1))


def requests(seed: int) -> list[Request]:
    rare = synthetic(Synthetic(0.003, HOUR_S, 2.0, prompt_tokens=100, output_tokens=20), names_of(MODELS), seed)
    regular = [Request(300.0 * n, "regular", 100, 20) for n in range(int(HOUR_S / 300))]
    return sorted([*rare, *regular], key=lambda r: r.at)


def run(memory: str, profile: str, seed: int) -> tuple[Outcome, list[tuple[float, Effect]], int]:
    """Return the outcome, all effects with their times, and the calls of `decide`."""
    effects: list[tuple[float, Effect]] = []
    calls = 0

    def record(state: ClusterState, event: Event, now: float, policy: Policy) -> Decision:
        nonlocal calls
        calls += 1
        decision = decide(state, event, now, policy)
        effects.extend((now, effect) for effect in decision.effects)
        return decision

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator.mesh.run, "decide", record)
        outcome = Simulation(cluster(memory), MODELS, profile_named(profile), seed).run(requests(seed))
    return outcome, effects, calls


@pytest.mark.parametrize(("memory", "profile", "seed"), [("unified", "thaw", 1), ("unified", "lru", 2), ("separate", "thaw", 3)])
def test_skipped_ticks_leave_all_results_as_they_are(memory: str, profile: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = run(memory, profile, seed)
    monkeypatch.setattr(IdleTicks, "changes_nothing", lambda *_: False)
    expected: Any = run(memory, profile, seed)
    assert found[:2] == expected[:2]
    assert found[2] < expected[2] / 2
    timed = SendExpectation if memory == "separate" else SendPrefetch
    assert any(isinstance(effect, timed) for _, effect in expected[1])
