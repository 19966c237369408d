"""Invariants of runs under every profile: memory, requests, links, determinism."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.clock import Clock
from simulator.config import (
    Batching,
    ClusterFile,
    Failures,
    Fixed,
    LinkSpeeds,
    ModelGroup,
    NodeGroup,
    Runtime,
    Startup,
    names_of,
)
from simulator.controller import Controller
from simulator.failures import schedule
from simulator.instances import SimDevice
from simulator.links import Link, Network
from simulator.policies import PROFILES
from simulator.workloads.synthetic import Synthetic, synthetic
from simulator.world import World
from tests.support.examples import examples

CHAT = Batching(prefill_tokens_per_second=2000, tpot_ms=30, tpot_ms_more=2, concurrency=4)
MODELS = [
    ModelGroup(name="big", copies=4, weights_gb=10, kv_gb=5, service=Fixed(seconds=2), slo_ttft=10, keep_alive=5, resume_s=0.05),
    ModelGroup(
        name="chat",
        copies=4,
        weights_gb=6,
        kv_gb=2,
        kv_mb_per_token=0.5,
        service=CHAT,
        slo_ttft=4,
        slo_tpot=0.2,
        replicas_max=3,
        priority=1,
        resume_s=0.05,
    ),
]


class Watched(World):
    """Checks a device at every change, and the links at the end."""

    def touch(self, device: SimDevice) -> None:
        super().touch(device)
        assert device.booked >= 0
        assert 0 <= device.kept_bytes == sum(k.nbytes for k in device.kept.values())
        assert device.promised >= 0
        assert device.booked + device.kept_bytes <= device.budget
        booked = sum(p.nbytes for i in device.instances.values() for p in i.parts if p.device is device)
        assert device.booked + device.promised <= booked + 10 * 10**9  # bytes booked beside instances are KV cache


def run(cluster: ClusterFile, profile: str, seed: int, rps: float, cv: float) -> tuple[World, dict[str, Any]]:
    requests = synthetic(Synthetic(rps, 60, cv, 0.5, 100, 60, 0.5), names_of(MODELS), seed)
    world = Watched(cluster, MODELS, PROFILES[profile], seed)
    controller = Controller(world)
    schedule(world, controller)
    outcome = controller.run(requests)
    numbers = sorted([s.number for s in outcome.served] + [n for _, _, n in outcome.given_up])
    assert numbers == list(range(len(requests))), "every request is served, failed or timed out exactly once"
    assert outcome.lost == 0
    for s in outcome.served:
        assert s.queued >= 0
        assert s.ttft >= s.queued - 1e-9
        assert s.pause >= 0
        assert s.ended >= s.at
    for node in world.nodes.values():
        for link in node.links():
            assert link.carried <= link.bandwidth * outcome.ended_at * (1 + 1e-6) + 1e4
    return world, outcome.figures()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(PROFILES)),
    st.integers(0, 10**6),
    st.floats(0.1, 3.0),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.booleans(),
    st.sampled_from([None, 60.0]),
    st.sampled_from([None, "elastic", "exclusive"]),
)
def test_simulation_invariants_hold_for_any_workload(
    profile: str, seed: int, rps: float, cv: float, plain: bool, mtbf: float | None, kind: str | None
) -> None:
    links = LinkSpeeds(
        remote=1, ssd=4, device=12, bus=18, peer=20, sequential=frozenset() if plain else frozenset({"remote", "ssd"})
    )
    startup = Startup(
        container_s=0.5,
        context_s=0.2,
        libraries_s=0.4,
        init_s=0.3,
        leave_s=0.1,
        prefetch=not plain,
        stream=not plain,
        overlap=not plain,
    )
    runtime = Runtime(startup=startup, timeout_s=60, elastic_kv=kind == "elastic", exclusive=kind == "exclusive", hop_s=0.002)
    node = NodeGroup(count=2, devices=2, device_gb=24, dram_gb=40, ssd_gb=30, links=links)
    cluster = ClusterFile(nodes=(node,), runtime=runtime, failures=Failures(mtbf_s=mtbf, mttr_s=10))
    first, again = run(cluster, profile, seed, rps, cv), run(cluster, profile, seed, rps, cv)
    assert first[1] == again[1]


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 1000), st.sets(st.integers(0, 3), min_size=1), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.integers(0, 3)),
)
def test_bytes_on_links_are_conserved(flows: list[tuple[float, int, set[int], bool]], sequential: set[int]) -> None:
    clock, network = Clock(), None
    links = [Link(f"l{n}", 100.0 * (n + 1), n in sequential) for n in range(4)]
    network = Network(clock)
    arrived: list[int] = []
    for number, (at, nbytes, path, background) in enumerate(flows):

        def begin(nbytes: int = nbytes, path: set[int] = path, background: bool = background, number: int = number) -> None:
            chosen = tuple(links[n] for n in sorted(path))
            network.start(chosen, nbytes, lambda: arrived.append(number), background)
            for link in links:
                rate = sum(f.rate for f in link.flows)
                assert rate <= link.bandwidth * (1 + 1e-9)
                assert not link.sequential or sum(f.rate > 0 for f in link.flows) <= 1

        clock.at(at, begin)
    clock.run()
    assert sorted(arrived) == list(range(len(flows)))
    for n, link in enumerate(links):
        assert link.carried == pytest.approx(sum(nbytes for _, nbytes, path, _ in flows if n in path), abs=1)
        assert link.carried <= link.bandwidth * clock.now + 1


def test_links_are_shared_fairly_and_background_flows_take_the_rest() -> None:
    clock = Clock()
    network, wide, narrow = Network(clock), Link("wide", 100), Link("narrow", 20)
    ended: dict[str, float] = {}

    def begin(name: str, path: tuple[Link, ...], nbytes: float, background: bool = False) -> None:
        network.start(path, nbytes, lambda: ended.update({name: clock.now}), background)

    begin("narrow", (wide, narrow), 40)  # 20 a second
    begin("wide", (wide,), 160)  # the other 80
    begin("later", (wide,), 100, background=True)  # none, until both are through
    clock.run()
    assert ended == pytest.approx({"narrow": 2.0, "wide": 2.0, "later": 3.0})
