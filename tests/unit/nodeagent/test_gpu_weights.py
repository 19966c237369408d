"""The nodeagent's accounting of weights that the loader has on a GPU.

It reports them, charges them once, and reads memory back at their release.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from services.nodeagent.adapters import meter as meters
from services.nodeagent.adapters.meter import Meter
from services.nodeagent.devices.port import DeviceInfo
from services.nodeagent.devices.weights import weights_on_gpu
from shared.contracts.loader import LoaderStatus, SegmentStatus
from shared.contracts.node import WEIGHTS_ON_GPU, Capability, InstanceState
from tests.unit.nodeagent.world import World

LOADER = 7
NO_INSTANCE = 7_000_001


class Gpu:
    """`cuda:0` as NVML reports it; a process without memory is not listed."""

    info = DeviceInfo("cuda:0", "cuda", "fake", 100, 100)

    def __init__(self) -> None:
        self.by_pid: dict[int, int] = {}
        self.used = 0
        self.readings = 0

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        self.readings += 1
        return {p: n for p, n in self.by_pid.items() if p in set(pids)}

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        return self.used


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def world() -> World:
    """Create a node with two instances of one model on the GPU and one on the CPU."""
    found = World("cpu:0", "cuda:0")
    for name, device in (("a", "cuda:0"), ("b", "cuda:0"), ("c", "cpu:0")):
        found.ready(name, reserve=20, devices=(device,))
    return found


@pytest.fixture
def meter(world: World, gpu: Gpu) -> Meter:
    """Report that all instances hold the model's weights."""
    found = Meter({"cuda:0": gpu}, lambda: world.state, lambda: None, lambda *_: None)
    report_loader(found, {"cuda:0": 40})
    return found


def report_loader(meter: Meter, on_devices: dict[str, int]) -> None:
    held = ("a", "b", "c")
    segment = SegmentStatus(
        weights_id="w", model="m", segment="s", total_bytes=40, loaded_bytes=30, holders=held, on_devices=on_devices
    )
    meter.on_loader_status(LoaderStatus(node="n", boot_id="l", pid=LOADER, segments=(segment,)))


def test_weights_are_charged_where_the_instance_computes(meter: Meter) -> None:
    assert [meter.weights(i) for i in ("a", "b", "c")] == [40, 40, 30]
    report_loader(meter, {})  # the engine has copied them into its own memory, which is measured separately
    assert [meter.weights(i) for i in ("a", "c")] == [0, 30]


async def test_the_loaders_bytes_are_read_back(meter: Meter, gpu: Gpu) -> None:
    gpu.by_pid = {LOADER: 60}
    before = await meter.loader_holds("a")
    assert (before, await meter.loader_holds("c")) == (60, 0)
    gpu.by_pid[LOADER] = 20
    assert await meter.wait_memory_returned("a", before, 40)


async def test_device_usage_is_read_if_pids_are_of_another_namespace(meter: Meter, gpu: Gpu) -> None:
    gpu.used = 90
    before = await meter.loader_holds("a")
    gpu.used = 50
    assert await meter.wait_memory_returned("a", before, 40)


async def test_bytes_still_in_use_are_not_reported_as_freed(meter: Meter, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "_GONE_WITHIN_S", 2.0)
    gpu.by_pid = {LOADER: 60}
    assert not await meter.wait_memory_returned("a", 60, 40)
    assert gpu.readings > 1


async def test_hosted_engine_is_gone_once_the_device_lists_none_of_its_processes(
    world: World, meter: Meter, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hosted engine's bytes are gone once the device lists none of its processes.

    The instance's own process is the host, which never had any.
    """
    monkeypatch.setattr(meters, "_GONE_WITHIN_S", 0.05)
    instance = world["a"].model_copy(
        update={"pid": NO_INSTANCE, "process_start": 1, "engine_pids": (NO_INSTANCE + 1, NO_INSTANCE + 2)}
    )
    gpu.by_pid = {NO_INSTANCE + 2: 60}
    with pytest.raises(TimeoutError, match="60 bytes"):
        await meter.wait_memory_freed(instance)
    gpu.by_pid = {LOADER: 60}
    await meter.wait_memory_freed(instance)


async def test_a_suspended_engine_is_reported_with_no_device_memory(world: World, meter: Meter, gpu: Gpu) -> None:
    instance = world["a"].model_copy(update={"pid": NO_INSTANCE})
    gpu.by_pid = {NO_INSTANCE: 60}
    await meter.measure(instance)
    gpu.by_pid = {}
    await meter.measure(instance)
    assert meter.get_private("a") == 60, "of one that serves nothing can only mean that it cannot be seen"
    await meter.measure(instance.model_copy(update={"state": InstanceState.SUSPENDED}))
    assert meter.get_private("a") == 0


async def test_freed_bytes_are_those_measured_before_the_stop(world: World, meter: Meter, gpu: Gpu) -> None:
    instance = world["a"].model_copy(update={"pid": NO_INSTANCE, "process_start": 1, "engine_pids": (NO_INSTANCE + 1,)})
    gpu.by_pid = {NO_INSTANCE: 10, NO_INSTANCE + 1: 60}
    await meter.measure(instance)
    gpu.by_pid = {NO_INSTANCE: 10}
    await meter.measure(instance.model_copy(update={"stop_asked": True}))
    gpu.by_pid = {}
    assert await meter.wait_memory_freed(instance) == 70


@pytest.mark.parametrize("available", [True, False])
def test_cuda_checkpoint_disables_shared_weights_on_the_gpu(*, available: bool) -> None:
    [reported] = weights_on_gpu({"cpu", "cuda"}, [Capability(name="suspend:cuda", available=available)])
    assert (reported.name, reported.available) == (WEIGHTS_ON_GPU, not available)
    assert ("610" in reported.reason) is available


def test_node_without_a_gpu_reports_no_gpu_capability() -> None:
    assert weights_on_gpu({"cpu"}, [Capability(name="suspend:cpu", available=True)]) == ()
