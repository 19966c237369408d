"""Models over several devices of one node: all or none, and resumption in place."""

from __future__ import annotations

from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.base import ErrorBody
from shared.contracts.plans import PlanRecord
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.world import World

ONE = 1000 * MIB
PARALLEL = {"engine": "vllm", "engine_args": {"tensor_parallel_size": 2}}


def need_of_one(w: World, name: str) -> int:
    return sum(i.reserve_bytes for i in w.state.of_model(name)) // 2


def parallel(w: World, name: str = "wide", memory: int = 1200 * MIB, **options: object) -> None:
    w.model(name, weights=100 * MIB, memory=memory, **{**PARALLEL, **options})


def world(*nodes: int) -> World:
    w = World()
    for n, devices in enumerate(nodes):
        w.node(f"n{n}", ONE, devices=tuple(f"cuda:{i}" for i in range(devices)))
    return w


def plan_of(w: World, name: str) -> PlanRecord:
    found = w.state.last_plan_of(name)
    assert found is not None
    return found


def test_multi_device_model_is_placed_on_devices_of_one_node() -> None:
    w = world(1, 2)
    parallel(w)
    w.demand("wide")
    (start,) = w.starts("wide")
    assert (start.node, start.command.device_ids) == ("n1", ("cuda:0", "cuda:1"))
    for device in ("cuda:0", "cuda:1"):
        assert booking_of(w.state, "n1", device).held_bytes == 600 * MIB
    assert plan_of(w, "wide").chosen.device_ids == ("cuda:0", "cuda:1")  # type: ignore[union-attr]  # it was placed


def test_registration_fails_if_no_node_has_enough_devices() -> None:
    w = world(1, 1)
    spec_error = w.admin(_registration(w))
    assert isinstance(spec_error, ErrorBody)
    assert "on each of 2 devices of one node" in spec_error.message


def _registration(w: World) -> object:
    from services.scheduler.domain.events import AddModelsRequested
    from shared.contracts.models import ModelSpec

    spec = ModelSpec.model_validate({"name": "wide", "source": "/m/wide", "memory": 1200 * MIB, **PARALLEL})
    return AddModelsRequested(w.now, "asked", (spec,), {"wide": model_info(spec.source, 100 * MIB)}, False)


def test_multi_device_model_starts_only_when_all_its_devices_have_room() -> None:
    w = world(2)
    parallel(w)
    w.model("small", weights=100 * MIB, memory=600 * MIB)
    small = w.up("small")
    small.active = 1
    w.tick(3)
    noted = w.demand("wide")
    assert noted.outlook == "waiting"
    assert "have no migration target" in noted.reason
    assert booking_of(w.state, "n0", "cuda:0").claimed_bytes == booking_of(w.state, "n0", "cuda:1").claimed_bytes == 0
    small.active = 0
    w.tick(3)
    w.demand("wide")
    assert len(w.stops("small")) == 1
    assert not w.starts("wide"), "it is claimed on both devices and starts on neither"
    assert booking_of(w.state, "n0", "cuda:1").claimed_bytes == 600 * MIB
    w.finish_stops()
    (start,) = w.starts("wide")
    assert start.command.device_ids == ("cuda:0", "cuda:1")


def test_free_devices_are_preferred_for_a_multi_device_model() -> None:
    w = world(4)
    parallel(w)
    for name in ("a", "b"):
        w.model(name, weights=100 * MIB, memory=800 * MIB)
        w.up(name)
    w.demand("wide")
    (start,) = w.starts("wide")
    assert start.command.device_ids == ("cuda:2", "cuda:3")
    assert not w.stops("a")


def test_failed_multi_device_start_is_retried_on_another_node() -> None:
    w = world(2, 2)
    parallel(w)
    w.demand("wide")
    from shared.errors import EngineFailed

    w.fail("wide", EngineFailed("it failed").body())
    w.tick(0.5)
    assert [s.node for s in w.starts("wide")] == ["n0", "n1"]
