"""Snapshots restored onto other GPUs: which ones, and the pairs for the driver."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cuda import CudaCheckpoint, State
from services.nodeagent.suspend.gpu_pairs import Gpu, gpus_of, others_of_kind, pairs
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import Target
from shared.errors import EngineFailed, RestoreFailed
from tests.unit.suspend.fake_driver import FakeDriver, FakeGpu

A = 7_000_001
GPUS = (
    Gpu("cuda:0", "L4", "GPU-0"),
    Gpu("cuda:1", "L4", "GPU-1"),
    Gpu("cuda:2", "H100", "GPU-2"),
    Gpu("cuda:3", "L4", "GPU-3", is_of_node=False),
)
TARGET = Target("i", "builtin", ("cuda:0",), (A,))
NO_GROUPS = Cgroups("n", None, None, "none here")


@pytest.fixture
def driver() -> FakeDriver:
    found = FakeDriver({A: 1 << 30})
    found.uuids = {g.uuid for g in GPUS}
    return found


def way(driver: FakeDriver, gpus: tuple[Gpu, ...] = GPUS) -> CudaCheckpoint:
    return CudaCheckpoint(driver, "", NO_GROUPS, MemoryUsage({"cuda:0": FakeGpu(driver)}), gpus)


def test_other_gpus_of_the_node_with_the_same_name_are_possible() -> None:
    assert others_of_kind(GPUS, "cuda:0") == ("cuda:1",)
    assert others_of_kind(GPUS, "cuda:2") == ()
    assert others_of_kind(GPUS, "cpu:0") == ()


def test_pairs_name_every_gpu_of_the_machine_once_on_both_sides() -> None:
    assert dict(pairs(GPUS, ("cuda:0",), ("cuda:1",))) == {"GPU-0": "GPU-1", "GPU-1": "GPU-0", "GPU-2": "GPU-2", "GPU-3": "GPU-3"}
    swapped = dict(pairs(GPUS, ("cuda:0", "cuda:1"), ("cuda:1", "cuda:3")))
    assert swapped == {"GPU-0": "GPU-1", "GPU-1": "GPU-3", "GPU-3": "GPU-0", "GPU-2": "GPU-2"}
    with pytest.raises(EngineFailed, match="cuda:7"):
        pairs(GPUS, ("cuda:0",), ("cuda:7",))


def test_nvml_lists_the_gpus_and_a_failing_one_forbids_moves() -> None:
    class NvmlError(Exception):
        pass

    def uuid(index: int) -> bytes:
        if index == 2:
            raise NvmlError("GPU is lost")
        return f"GPU-{index}".encode()

    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: "L4",
        nvmlDeviceGetUUID=uuid,
    )
    assert gpus_of(nvml, ["cuda:0"]) == (Gpu("cuda:0", "L4", "GPU-0"), Gpu("cuda:1", "L4", "GPU-1", is_of_node=False))
    nvml.nvmlDeviceGetCount = lambda: 3
    assert gpus_of(nvml, ["cuda:0"]) == ()
    assert gpus_of(None, ["cuda:0"]) == ()


def test_the_outlook_names_the_other_gpus_where_the_driver_moves_snapshots(driver: FakeDriver) -> None:
    assert way(driver).outlook(TARGET).moves_to == ("cuda:1",)
    assert way(driver).outlook(replace(TARGET, in_container=True)).moves_to == ()
    assert way(driver, ()).outlook(TARGET).moves_to == ()
    driver.uuids = set()
    assert way(driver).outlook(TARGET).moves_to == ()


async def test_a_snapshot_is_restored_onto_the_other_gpu(driver: FakeDriver) -> None:
    w = way(driver)
    await w.suspend(TARGET)
    await w.resume(replace(TARGET, device_ids=("cuda:1",), moved_from=("cuda:0",)))
    assert driver.states[A] is State.RUNNING
    assert dict(driver.restored_by[A])["GPU-0"] == "GPU-1"


async def test_a_resume_in_place_passes_no_pairs(driver: FakeDriver) -> None:
    w = way(driver)
    await w.suspend(TARGET)
    await w.resume(TARGET)
    assert driver.restored_by[A] == ()


async def test_a_driver_that_refuses_the_pairs_fails_the_restore(driver: FakeDriver) -> None:
    w = way(driver, GPUS[:3])  # one GPU of the machine is not named
    await w.suspend(TARGET)
    with pytest.raises(RestoreFailed, match="CUDA_ERROR_INVALID_VALUE"):
        await w.resume(replace(TARGET, device_ids=("cuda:1",), moved_from=("cuda:0",)))
    assert driver.states[A] is State.CHECKPOINTED
