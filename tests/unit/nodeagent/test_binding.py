"""Late binding: the device of a shared instance, chosen when it is attached."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.nodeagent.domain import events as e
from services.nodeagent.domain.binding import count_running, is_heavy, load_of
from services.nodeagent.domain.late_binding import DeviceLoad, Loads, StartTimes, Traffic, choose, traffic_of
from services.nodeagent.domain.state import Process
from services.scheduler.domain.cost.cost import Cost
from services.scheduler.domain.policies.port import Ask, DeviceView, Option
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import DeviceMemory, LinkStatus, LoaderStatus, SegmentStatus, WeightsOnDevice
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, StartInstance
from simulator.policies import torpor
from tests.unit.nodeagent.world import CARD, EPOCH, ERROR, World, report, start, stop

ALL = ("cpu:0", "cpu:1", "cpu:2")
_ORDER: dict[Loads, int] = {"none": 0, "light": 1, "heavy": 2}


def shared(instance_id: str = "i", *, grant: tuple[str, ...] = ALL[1:], name: str = "demo") -> StartInstance:
    spec = CARD.spec.model_copy(update={"isolation": "shared", "name": name, "source": f"/{name}"})
    card = ModelCard(spec=spec, info=CARD.info.model_copy(update={"revision": name, "source": f"/{name}"}), created=0)
    return start(instance_id, reserve=10).model_copy(update={"card": card, "grant": grant, "executor_bytes": 20})


def begin(w: World, command: StartInstance) -> tuple[str, tuple[e.Effect, ...]]:
    effects = w.receive(e.StartCommand(command, 1))
    return w[command.instance_id].command.device_ids[0], effects


def finish(w: World, command: StartInstance, after: float = 1.0, pid: int = 7) -> None:
    w.receive(e.EngineForked(command.instance_id, pid, 1))
    w.receive(e.EngineReported(report(command.instance_id, "ready", pid)), after=after)


def busy(w: World, instance_id: str, active: int = 1, pid: int = 7) -> None:
    w.receive(e.EngineReported(report(instance_id, "ready", pid).model_copy(update={"load": EngineLoad(active=active)})))


def report_traffic(w: World, **traffic: object) -> None:
    w.receive(e.LoaderReported({}, traffic=Traffic(**traffic)))  # type: ignore[arg-type]


# -- Algorithm 1


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([DeviceLoad("a"), DeviceLoad("b", is_resident=True)], ("b", "resident")),
        ([DeviceLoad("a"), DeviceLoad("b", 1, is_resident=True)], ("a", "quiet")),
        ([DeviceLoad("a"), DeviceLoad("b", peer_bytes_per_second=1), DeviceLoad("c", peer_bytes_per_second=2)], ("c", "peer")),
        ([DeviceLoad("a", neighbour_loads="heavy"), DeviceLoad("b")], ("b", "quiet")),
        ([DeviceLoad("a", neighbour_loads="heavy"), DeviceLoad("b", neighbour_loads="light")], ("b", "light")),
        ([DeviceLoad("a", 1), DeviceLoad("b", neighbour_loads="heavy")], ("b", "host")),
        ([DeviceLoad("a", 2), DeviceLoad("b", 1)], ("b", "busy")),
        ([DeviceLoad("a", 1), DeviceLoad("b", 1, is_resident=True)], ("b", "busy")),
        ([DeviceLoad("a"), DeviceLoad("b", has_executor=True)], ("a", "quiet")),
        ([DeviceLoad("a"), DeviceLoad("b")], ("a", "quiet")),
    ],
)
def test_the_rules_in_their_order(devices: list[DeviceLoad], expected: tuple[str, str]) -> None:
    bound = choose(devices)
    assert (bound.device_id, bound.rule) == expected


_DEVICE = st.builds(
    DeviceLoad,
    device_id=st.just(""),
    running=st.integers(0, 2),
    is_resident=st.booleans(),
    peer_bytes_per_second=st.sampled_from([0.0, 1.0, 2.0]),
    neighbour_loads=st.sampled_from(list(_ORDER)),
    has_executor=st.booleans(),
)


@given(st.lists(_DEVICE, min_size=1, max_size=5))
def test_choices_are_those_of_the_simulated_policy(drawn: list[DeviceLoad]) -> None:
    """Both implement Algorithm 1: devices of the same class, with ties drawn otherwise."""
    devices = [d._replace(device_id=f"cpu:{n}") for n, d in enumerate(drawn)]
    options = []
    for d in devices:
        view = DeviceView(d.device_id, "n", 1, 1, running=d.running, neighbour_loads=d.neighbour_loads)
        way = "ready" if d.is_resident else "peer_copy" if d.peer_bytes_per_second else "load"
        seconds = 1 / d.peer_bytes_per_second if d.peer_bytes_per_second else 1.0
        options.append(Option((view,), way, Cost(seconds)))  # type: ignore[arg-type]
    there = torpor.choose(Ask("m", 1, 0.0), options, "seed")
    here = choose(devices)
    if there is None:
        assert here.rule == "busy"
        return
    by_id = {d.device_id: d for d in devices}
    theirs, ours = by_id[there.devices[0].key], by_id[here.device_id]
    assert not ours.running
    assert ours.is_resident == theirs.is_resident
    if not ours.is_resident:
        assert ours.peer_bytes_per_second == theirs.peer_bytes_per_second
        if not ours.peer_bytes_per_second:
            assert ours.neighbour_loads == theirs.neighbour_loads


# -- The agent's decisions


def test_starts_are_bound_to_devices_that_compute_nothing() -> None:
    w = World(*ALL)
    bound = [begin(w, shared(f"i{n}", name=f"m{n}"))[0] for n in range(3)]
    assert sorted(bound) == list(ALL), "a start counts before it computes"
    for n, device_id in enumerate(bound):
        assert w.state.ledger.bookings[f"i{n}"].device_ids == (device_id,)


def test_the_loader_is_asked_to_load_to_the_bound_device() -> None:
    w = World(*ALL)
    first = shared("first", name="m0")
    begin(w, first)
    device_id, effects = begin(w, shared("second", name="m1"))
    assert device_id != "cpu:0"
    assert [x for x in effects if isinstance(x, e.Prepare | e.Fork)] == [e.Prepare("second"), e.Fork("second")]


def test_without_a_grant_the_planned_device_is_taken() -> None:
    w = World(*ALL)
    begin(w, shared("first", name="m0", grant=()))
    device_id, effects = begin(w, shared("second", name="m1", grant=()))
    assert (device_id, w["second"].binding) == ("cpu:0", None)
    assert not [x for x in effects if isinstance(x, e.Prepare)]


def test_start_that_waits_for_bytes_is_prepared_once_it_is_granted() -> None:
    w = World("cpu:0")
    first = shared("first", name="m0", grant=()).model_copy(update={"reserve_bytes": 60})
    begin(w, first)
    finish(w, first)
    waiting = shared("second", name="m1", grant=("cpu:0",)).model_copy(update={"reserve_bytes": 60, "wait_ms": 10_000})
    _, effects = begin(w, waiting)
    assert w["second"].process is Process.QUEUED
    assert not [x for x in effects if isinstance(x, e.Prepare | e.Fork)], "its weights would take the first one's pages"
    w.receive(e.StopCommand(stop("first"), 2))
    w.receive(e.EngineExited("first", 7, 0, ERROR))
    w.receive(e.WeightsReleased("first", 0))
    effects = w.receive(e.MemoryFreed("first", 0))
    assert [x for x in effects if isinstance(x, e.Prepare | e.Fork)] == [e.Prepare("second"), e.Fork("second")]


def test_dedicated_instances_stay_on_the_planned_device() -> None:
    w = World(*ALL)
    begin(w, shared("first", name="m0"))
    alone = start("alone", reserve=10).model_copy(update={"grant": ALL[1:]})
    device_id, effects = begin(w, alone)
    assert device_id == "cpu:0"
    assert e.Prepare("alone") in effects, "the scheduler left it to the node"


def test_only_granted_devices_with_room_are_considered() -> None:
    w = World(*ALL)
    begin(w, shared("first", name="m0", grant=()))
    w.receive(e.StartCommand(start("large", reserve=90, devices=("cpu:1",)), 1))
    assert begin(w, shared("second", name="m1", grant=("cpu:1",)))[0] == "cpu:0", "cpu:1 has no room, cpu:2 is not granted"


def test_a_start_is_refused_if_no_granted_device_has_room() -> None:
    w = World(*ALL)
    for device in ALL:
        w.receive(e.StartCommand(start(device, reserve=90, devices=(device,)), 1))
    effects = w.receive(e.StartCommand(shared("i"), 5))
    [answer] = [x for x in effects if isinstance(x, e.Reply)]
    assert answer.error is not None
    assert answer.error.should_retry
    assert w.find("i") is None


def test_a_repeated_start_is_not_bound_again() -> None:
    w = World(*ALL)
    begin(w, shared("other", name="m0", grant=()))
    command = shared("i", name="m1")
    device_id, _ = begin(w, command)
    finish(w, command)
    busy(w, "i")
    again, effects = begin(w, command.model_copy(update={"token": EPOCH + 1}))
    assert again == device_id
    assert not [x for x in effects if isinstance(x, e.Fork | e.Prepare)]


def test_the_next_agent_adopts_a_start_with_its_binding() -> None:
    """The agent dies between the binding and the attach: the record has the device."""
    old = World(*ALL)
    begin(old, shared("other", name="m0", grant=()))
    device_id, effects = begin(old, shared("i", name="m1"))
    assert next(x for x in effects if isinstance(x, e.Persist | e.Fork)) == e.Persist("i"), "recorded before it is attached"
    record = type(old["i"]).model_validate_json(old["i"].model_dump_json())
    new = World(*ALL)
    new.receive(e.Adopted(record, False, ERROR))
    assert new["i"].command.device_ids == (device_id,)
    assert new["i"].state is InstanceState.FAILED
    new.receive(e.MemoryFreed("i", 0))
    new.receive(e.WeightsReleased("i", 0))
    assert new.state.ledger.bookings == {}


def test_an_executor_that_dies_before_the_attach_frees_the_bound_device() -> None:
    w = World(*ALL)
    begin(w, shared("other", name="m0", grant=()))
    device_id, _ = begin(w, shared("i", name="m1"))
    w.receive(e.ForkFailed("i", ERROR))
    assert w["i"].process is Process.GONE
    w.receive(e.MemoryFreed("i", 0))
    w.receive(e.WeightsReleased("i", 0))
    assert "i" not in w.state.ledger.bookings
    assert count_running(w.state, device_id) == 0


def test_requests_and_their_end_decide_which_device_is_free() -> None:
    w = World("cpu:0", "cpu:1")
    first = shared("first", name="m0", grant=())
    begin(w, first)
    finish(w, first)
    busy(w, "first", active=2)
    assert count_running(w.state, "cpu:0") == 2
    assert begin(w, shared("second", name="m1", grant=("cpu:1",)))[0] == "cpu:1"
    busy(w, "first", active=0)
    assert begin(w, shared("third", name="m2", grant=("cpu:1",)))[0] == "cpu:0", "cpu:1 loads a model that will compute"


def test_weights_on_a_free_device_and_on_a_busy_one() -> None:
    w = World(*ALL)
    first = shared("first", name="m0", grant=())
    begin(w, first)
    finish(w, first)
    whole = {"cpu:2": frozenset({"m1"})}
    report_traffic(w, whole=whole)
    assert begin(w, shared("second", name="m1"))[0] == "cpu:2"
    assert w["second"].binding is not None
    assert w["second"].binding.rule == "resident"
    w.receive(e.StopCommand(stop("second"), 2))

    w = World(*ALL)
    holder = shared("holder", name="m1", grant=())
    begin(w, holder)
    finish(w, holder)
    busy(w, "holder")
    speeds = {("cpu:0", "cpu:1"): 1e9, ("cpu:0", "cpu:2"): 2e9}
    report_traffic(w, whole={"cpu:0": frozenset({"m1"})}, speeds=speeds)
    assert begin(w, shared("second", name="m1"))[0] == "cpu:2"
    assert w["second"].binding is not None
    assert w["second"].binding.rule == "peer"


def test_loads_of_neighbours_are_avoided_until_they_are_measured_as_light() -> None:
    """Two buses: cpu:0 and cpu:1, cpu:2 and cpu:3. A load runs on cpu:1."""
    buses = {"cpu:0": "a", "cpu:1": "a", "cpu:2": "b", "cpu:3": "b"}
    w = World(*buses)
    report_traffic(w, buses=buses, loads={"cpu:1": 1})
    assert load_of(w.state, "cpu:0", "m").neighbour_loads == "heavy", "an unknown load"
    assert begin(w, shared("i", grant=("cpu:2",)))[0] == "cpu:2"

    w = World(*buses)
    report_traffic(w, buses=buses)
    command = shared("loading", name="light", grant=()).model_copy(update={"device_ids": ("cpu:1",)})
    begin(w, command)
    assert load_of(w.state, "cpu:0", "m").neighbour_loads == "heavy", "not measured yet"
    times = {"light@light": StartTimes(1.0, 1.1)}
    w.state = replace(w.state, start_times=times)
    assert load_of(w.state, "cpu:0", "m").neighbour_loads == "light"
    finish(w, command)
    assert load_of(w.state, "cpu:0", "m").neighbour_loads == "none"


def test_slowdown_beside_loads_is_measured_by_attaches_only() -> None:
    w = World(*ALL)
    report_traffic(w, buses=dict.fromkeys(ALL, "a"))
    turn = 0

    def attach(seconds: float, *, beside: bool) -> None:
        nonlocal turn
        turn += 1
        report_traffic(w, buses=dict.fromkeys(ALL, "a"), loads=dict.fromkeys(ALL, 1) if beside else {})
        command = shared(f"i{turn}", name="m")
        begin(w, command)
        finish(w, command, after=seconds, pid=7)
        w.receive(e.EngineExited(f"i{turn}", 7, 0, ERROR))
        w.receive(e.MemoryFreed(f"i{turn}", 0))
        w.receive(e.WeightsReleased(f"i{turn}", 0))

    attach(9.0, beside=False)
    assert w.state.start_times == {}, "that start paid for its executor"
    begin(w, other := shared("stays", name="other", grant=()))
    finish(w, other, pid=8)
    w.state = replace(w.state, ledger=w.state.ledger.set_executor("cpu:1", 20).set_executor("cpu:2", 20))
    attach(1.0, beside=False)
    assert is_heavy(w.state, shared(name="m")), "only one of both is measured"
    attach(1.1, beside=True)
    assert not is_heavy(w.state, shared(name="m"))
    attach(4.0, beside=True)
    assert is_heavy(w.state, shared(name="m"))


# -- The loader's report


def test_traffic_of_a_loader_status() -> None:
    def memory(device_id: str, numa: int | None, missing: int) -> DeviceMemory:
        weights = (WeightsOnDevice(weights_id="w", total_bytes=9, missing_bytes=missing, read_bytes=0, unmapped_bytes=0),)
        return DeviceMemory(
            device_id=device_id, total_bytes=9, free_bytes=9, mapped_bytes=0, reusable_bytes=0, weights=weights, numa_node=numa
        )

    segment = SegmentStatus(
        weights_id="g", model="m", segment="s", total_bytes=9, loaded_bytes=9, holders=(), on_devices={"cuda:0": 9, "cuda:1": 3}
    )
    links = (
        LinkStatus(link="bus:cpu:0", loads=2),
        LinkStatus(link="bus:cuda:0"),
        LinkStatus(link="p2p:cpu:0>cpu:1", bytes_per_second=5.0),
        LinkStatus(link="p2p:cpu:1>cpu:0"),
        LinkStatus(link="ssd:x", bytes_per_second=1.0, loads=3),
    )
    memories = (memory("cpu:0", 0, 0), memory("cpu:1", 0, 4), memory("cpu:2", 1, 0))
    traffic = traffic_of(LoaderStatus(node="n", boot_id="b", memory=memories, links=links, segments=(segment,)))
    assert traffic.loads == {"cpu:0": 2, "cuda:0": 0}
    assert traffic.speeds == {("cpu:0", "cpu:1"): 5.0}
    assert {d for d, w in traffic.whole.items() if w} == {"cpu:0", "cpu:2", "cuda:0"}
    assert traffic.list_neighbours("cpu:0") == ["cpu:1"]
    assert traffic.list_neighbours("cuda:0") == ["cuda:1"]
    assert traffic.list_neighbours("cpu:9") == []
