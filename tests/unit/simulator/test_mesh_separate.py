"""The scheduler on simulated devices that keep weights. Results are computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.profiles import profile_named
from shared.contracts.node import StartInstance
from shared.contracts.phases import Phase
from simulator.clock import Clock
from simulator.config import GB, Batching, ClusterFile, LinkSpeeds, ModelGroup, NodeGroup, Runtime, Startup
from simulator.hardware import Node
from simulator.instances import Instance, SimDevice
from simulator.mesh.machine import MeshInstance
from simulator.mesh.residency import Residency
from simulator.mesh.run import Simulation, card_of
from simulator.report import Outcome, Served
from simulator.workloads.request import Request

SERVICE = Batching(prefill_tokens_per_second=1000, tpot_ms=100, concurrency=4)
MODEL = ModelGroup(name="m", weights_gb=10, kv_gb=2, service=SERVICE, slo_ttft=10, keep_alive=-1, copies=3)
STARTUP = Startup(container_s=0.5, init_s=0.5)
COPY_S, START_S = 5.0, 1.0


def group(devices: int, gb: float, peer: float | None = None) -> NodeGroup:
    links = LinkSpeeds(remote=1, ssd=5, device=2, peer=peer)
    return NodeGroup(devices=devices, device_gb=gb, dram_gb=100, memory="separate", links=links)


def run(models: Sequence[ModelGroup], requests: Sequence[Request], node: NodeGroup, startup: Startup = STARTUP) -> Outcome:
    runtime = Runtime(startup=startup, message_ms=0, capabilities=frozenset({"preempt", "reuse"}), in_dram=True)
    return Simulation(ClusterFile(nodes=(node,), runtime=runtime), models, profile_named("lru")).run(requests)


def in_order(outcome: Outcome) -> list[Served]:
    return sorted(outcome.served, key=lambda s: s.at)


def ask(at: float, model: str, output: int = 2) -> Request:
    return Request(at, model, 100, output)


@pytest.mark.parametrize(("gb", "copied"), [(30, 0.0), (24, 6 / 2), (20, COPY_S)])
def test_a_load_copies_what_the_device_lacks(gb: float, copied: float) -> None:
    """Beside the two latest models of 10 GB there is room for all, 4 GB or none of the first."""
    requests = [ask(60.0 * n, f"m-{model}") for n, model in enumerate((0, 1, 2, 0))]
    outcome = run([MODEL], requests, group(1, gb))
    assert [s.queued for s in in_order(outcome)[:3]] == pytest.approx([COPY_S + 0.5] * 3, abs=0.3)
    assert in_order(outcome)[3].queued == pytest.approx(max(0.5, copied) + 0.5, abs=0.3)
    assert outcome.loads.get("reuse", 0) == (0 if copied == COPY_S else 1)


@pytest.mark.parametrize(("there", "peer", "seconds"), [(0, 6.0, 5.0), (10, None, 5.0), (10, 6.0, 1.25), (5, 6.0, 2.5)])
def test_another_device_and_host_memory_share_a_load(there: int, peer: float | None, seconds: float) -> None:
    cluster = ClusterFile(nodes=(group(2, 14, peer),), runtime=Runtime(in_dram=True))
    model = MODEL.model_copy(update={"copies": 1})
    simulation = Simulation(cluster, [model], profile_named("lru"))
    node = simulation.nodes["node-0"]
    source, target = node.sim.devices
    load_and_stop(node.residency[source.key], "m", 0.0)
    source.drop("m", (10 - there) * GB)
    start = StartInstance(
        token=1, plan_id="p", instance_id="i", card=card_of("m", model), device_ids=("cuda:1",), reserve_bytes=12 * GB, kv_bytes=0
    )
    arrived: dict[Phase, float] = {}
    instance = MeshInstance(start, Mock(), target, 0.0)
    simulation.agents.weights.load(node, instance, lambda phase: arrived.update({phase: simulation.world.clock.now}))
    simulation.world.clock.run(until=lambda: simulation.world.clock.now > 60)
    assert arrived[Phase.LOAD] == pytest.approx(seconds)


@pytest.mark.parametrize(("memory", "possible"), [("unified", True), ("separate", False)])
def test_nodes_report_that_instances_of_separate_devices_cannot_be_suspended(memory: str, possible: bool) -> None:
    runtime = Runtime(startup=STARTUP, message_ms=0, capabilities=frozenset({"suspend", "reuse"}), in_dram=True)
    machine = group(1, 22).model_copy(update={"memory": memory})
    simulation = Simulation(ClusterFile(nodes=(machine,), runtime=runtime), [MODEL], profile_named("lru"))
    simulation.run([ask(0, "m-0")])
    assert [report.status.suspension.possible for report in simulation.state.reports.values()] == [possible]


@pytest.mark.parametrize(
    ("ssd_gb", "is_on_disk", "whole_first", "seconds"),
    [
        (100, True, False, {"part": 1.6, "whole": 2.8}),
        (100, True, True, {"part": 2.0, "whole": 2.0}),
        (100, False, False, {"part": 4.0, "whole": 10.0}),
        (0, False, False, {"part": 8.0, "whole": 14.0}),
    ],
)
def test_load_of_all_weights_does_not_end_with_that_of_a_part(
    ssd_gb: float, is_on_disk: bool, whole_first: bool, seconds: dict[str, float]
) -> None:
    """A device lacks 4 GB, another one all 10 GB; the disk has 5 GB/s and the source 1 GB/s.

    A part is a load of its own, unless all of the weights are being loaded. A disk that caches the
    source is filled by both together.
    """
    node_group = group(2, 14).model_copy(update={"ssd_gb": float(ssd_gb)})
    model = MODEL.model_copy(update={"copies": 1})
    simulation = Simulation(ClusterFile(nodes=(node_group,)), [model], profile_named("lru"))
    node, clock = simulation.nodes["node-0"], simulation.world.clock
    part, whole = node.sim.devices
    load_and_stop(node.residency[part.key], "m", 0.0)
    part.drop("m", 4 * GB)
    if not is_on_disk:
        node.sim.ssd.remove("m")
    fetched: dict[str, float] = {}

    def load(name: str, device: SimDevice) -> None:
        start = StartInstance(
            token=1,
            plan_id="p",
            instance_id=name,
            card=card_of("m", model),
            device_ids=(f"cuda:{device.index}",),
            reserve_bytes=12 * GB,
            kv_bytes=0,
        )

        def on_arrived(phase: Phase) -> None:
            if phase is Phase.FETCH:
                fetched[name] = clock.now

        simulation.agents.weights.load(node, MeshInstance(start, Mock(), device, 0.0), on_arrived)

    for name, device in (("whole", whole), ("part", part)) if whole_first else (("part", part), ("whole", whole)):
        load(name, device)
    clock.run(until=lambda: clock.now > 60)
    assert fetched == pytest.approx(seconds)


@pytest.mark.parametrize(("prompt_s", "first_s"), [(1.0, COPY_S), (8.0, START_S + 8.0)])
def test_prompts_are_computed_while_weights_are_copied(prompt_s: float, first_s: float) -> None:
    service = SERVICE.model_copy(update={"prefill_tokens_per_second": 100 / prompt_s})
    model = MODEL.model_copy(update={"copies": 1, "service": service})
    early = STARTUP.model_copy(update={"compute_while_loading": True})
    (served,) = run([model], [ask(0, "m")], group(1, 14), early).served
    assert served.ttft == pytest.approx(first_s, abs=0.1)
    (waiting,) = run([model], [ask(0, "m")], group(1, 14)).served
    assert waiting.ttft == pytest.approx(COPY_S + 0.5 + prompt_s, abs=0.1)


def test_requests_that_join_a_load_get_all_tokens() -> None:
    model = MODEL.model_copy(update={"copies": 2})
    early = STARTUP.model_copy(update={"compute_while_loading": True})
    outcome = run([model], [ask(0, "m-0", 5), ask(2, "m-0", 5), ask(3, "m-1", 5)], group(1, 14), early)
    first, joined, other = in_order(outcome)
    assert first.ended == joined.ended == pytest.approx(COPY_S + 0.4, abs=0.1)
    assert (outcome.failed, outcome.timed_out, outcome.lost) == (0, 0, 0)
    assert other.ended > joined.ended


def load_and_stop(found: Residency, model: str, now: float) -> None:
    found.reserve(model, 10 * GB, "i")
    found.complete(model)
    found.release(model, "i", now)


def device(gb: float) -> Residency:
    node: Node[Instance] = Node("n", group(1, gb), Clock())
    return Residency(node.devices[0])


def test_the_least_likely_weights_are_given_up_first() -> None:
    found = device(30)
    for n, model in enumerate(("likely", "unlikely")):
        load_and_stop(found, model, float(n))
    found.likelihood = {"likely": 0.9, "unlikely": 0.1}
    found.reserve("new", 15 * GB, "i")
    assert (found.count_copyable("likely"), found.count_copyable("unlikely")) == (10 * GB, 5 * GB)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=30))
def test_memory_is_conserved(steps: list[tuple[str, bool]]) -> None:
    found, running = device(20), dict[str, bool]()
    for n, (model, completes) in enumerate(steps):
        if model in running:
            found.release(model, "i", float(n))
            del running[model]
        elif len(running) < 2:
            missing = found.reserve(model, 9 * GB, "i")
            assert 0 <= missing <= 9 * GB
            running[model] = completes
            if completes:
                found.complete(model)
        memory = found.memory({})
        assert memory.free_bytes >= 0
        assert memory.free_bytes + memory.mapped_bytes + memory.reusable_bytes == memory.total_bytes
        assert memory.mapped_bytes == 9 * GB * len(running)
