"""Placement where another device of the node has units: they are copied from there."""

from __future__ import annotations

import pytest

from services.scheduler.domain.estimates.start_learning import updated_estimates
from services.scheduler.domain.estimates.start_times import DEFAULT_REUSE_MS, Forecast, Prediction
from services.scheduler.domain.state.accounting import booking_of
from shared.contracts.loader import CachedModel, DeviceMemory, LinkStatus, WeightsOnDevice
from shared.contracts.phases import Phase, PhaseSpan
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World

WEIGHTS = 1000 * MIB
BUS = LinkStatus(link="bus:cpu:2", bytes_per_second=100.0 * MIB)
PEER = LinkStatus(link="p2p:cpu:1>cpu:2", bytes_per_second=300.0 * MIB)


def on_device(missing_mib: int, peers_mib: dict[str, int] | None = None) -> WeightsOnDevice:
    """Return the model's weights as a device reports them.

    Args:
        missing_mib: MiB that are not on the device.
        peers_mib: MiB of units that the device lacks or waits for, by the device that has them.
    """
    return WeightsOnDevice(
        weights_id="rev-/m/m",
        total_bytes=WEIGHTS,
        missing_bytes=missing_mib * MIB,
        read_bytes=missing_mib * MIB,
        unmapped_bytes=WEIGHTS,
        peer_bytes={peer: n * MIB for peer, n in (peers_mib or {}).items()},
    )


def memory(device_id: str, *weights: WeightsOnDevice) -> DeviceMemory:
    return DeviceMemory(
        device_id=device_id, total_bytes=4000 * MIB, free_bytes=4000 * MIB, mapped_bytes=0, reusable_bytes=0, weights=weights
    )


@pytest.fixture
def w() -> World:
    world = World()
    world.node("n", 4000 * MIB, devices=("cpu:1", "cpu:2"))
    world.model("m", weights=WEIGHTS)
    return world


def report(w: World, *memories: DeviceMemory, tier: str = "dram", links: tuple[LinkStatus, ...] = (BUS, PEER)) -> None:
    cached = CachedModel.model_validate({"weights_id": "rev-/m/m", "tier": tier, "nbytes": WEIGHTS})
    w.loader("n", memories, links=links, cached=(cached,))


def predicted(w: World, device: str = "cpu:2") -> Prediction:
    return Forecast(w.state, w.state.models["m"].card, w.now).predict(booking_of(w.state, "n", device), leaving=False)


def test_units_of_another_device_are_loaded_over_both_links(w: World) -> None:
    report(w, memory("cpu:1", on_device(0)), memory("cpu:2"))
    found = predicted(w)
    assert found.phases["load"] == pytest.approx(2500 + DEFAULT_REUSE_MS)
    assert (found.peers, found.peer_bytes, found.read_bytes) == (("cpu:1",), 750 * MIB, 0)


def test_only_units_that_the_peer_lacks_are_read(w: World) -> None:
    disk = LinkStatus(link="ssd:x", bytes_per_second=50.0 * MIB)
    report(w, memory("cpu:1", on_device(400)), memory("cpu:2"), tier="ssd", links=(BUS, PEER, disk))
    found = predicted(w)
    assert found.phases["load"] == pytest.approx(8000 + DEFAULT_REUSE_MS), "400 MiB from the disk take longest"
    assert (found.peer_bytes, found.read_bytes) == (600 * MIB, 400 * MIB)


def test_units_of_other_devices_are_counted_besides_those_of_the_device(w: World) -> None:
    report(w, memory("cpu:1", on_device(0)), memory("cpu:2", on_device(500, {"cpu:1": 500})))
    found = predicted(w)
    assert (found.resident_bytes, found.peer_bytes) == (500 * MIB, 375 * MIB)
    assert found.phases["load"] == pytest.approx(1250 + DEFAULT_REUSE_MS)


def test_units_that_another_load_copies_are_not_copied_again(w: World) -> None:
    """The loader counts them as reserved, and as units that the other device has."""
    report(w, memory("cpu:1", on_device(0)), memory("cpu:2", on_device(0, {"cpu:1": 500})))
    found = predicted(w)
    assert (found.peers, found.peer_bytes, found.read_bytes) == ((), 0, 0)
    assert found.phases["load"] == pytest.approx(DEFAULT_REUSE_MS)


def test_units_of_unknown_content_are_not_copied_from_another_device(w: World) -> None:
    unknown = on_device(0).model_copy(update={"read_bytes": WEIGHTS})
    report(w, memory("cpu:1", unknown), memory("cpu:2"))
    assert predicted(w).peers == ()


def test_the_plan_names_the_source_device(w: World) -> None:
    report(w, memory("cpu:1", on_device(0)), memory("cpu:2"))
    w.model("big", weights=3500 * MIB)
    w.up("big")
    [big] = w.of("big")
    free = "cpu:2" if big.command.device_ids == ("cpu:1",) else "cpu:1"
    other = {"cpu:1": "cpu:2", "cpu:2": "cpu:1"}[free]
    report(w, *(memory(d, on_device(0)) if d == other else memory(d) for d in ("cpu:1", "cpu:2")), links=())
    w.demand("m")
    plan = w.state.last_plan_of("m")
    assert plan is not None
    assert plan.chosen is not None
    assert (plan.chosen.ready_by, plan.chosen.device_ids, plan.chosen.peers) == ("peer_copy", (free,), (other,))
    assert f"500.0 of 1000.0 MiB from {other}" in plan.reason
    # The loader measures the links between devices; the start says nothing of one link alone.
    spans = (PhaseSpan(phase=Phase.LOAD, start_ms=0, duration_ms=900.0),)
    learned = updated_estimates(w.state, plan.model_copy(update={"outcome": "ready", "measured": spans}))
    assert not [k for e in learned for k in e.parameters if k.startswith("bandwidth")]
