"""Steps remap and checkpoint of bench.gpu on stand-ins for CUDA's drivers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from bench.gpu import checkpoint, remap
from bench.gpu.checkpoint import measure_mapped, measure_sizes
from bench.gpu.mapping import MappingProcess, digest_of
from bench.gpu.remap import marked_units, measure_mapping, measure_sharing
from bench.gpu.runner import NOTHING_MEASURED
from services.nodeagent.suspend import cuda as suspend_cuda
from services.nodeagent.suspend.cgroups import Cgroups
from services.nodeagent.suspend.cuda import CudaCheckpoint, State
from services.nodeagent.suspend.memory_usage import MemoryUsage
from shared.errors import DeviceFailed, DeviceMissing
from tests.support.fake_virtual_memory import GRANULARITY, FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
from tests.unit.suspend.fake_driver import FakeDriver as FakeCheckpoint
from tests.unit.suspend.fake_driver import FakeGpu

STAND_IN = """
import socket, sys
from bench.gpu.mapping import serve
from tests.support.fake_virtual_memory import FakeVirtualMemory
from tests.unit.loader.devices.fake_driver import FakeDriver
memory = FakeVirtualMemory(0)
with socket.socket(fileno=int(sys.argv[1])) as peer:
    serve(peer, FakeDriver(1, memory), memory, 0)
"""
UNITS = 3


def command(fd: int) -> Sequence[str]:
    return [sys.executable, "-c", STAND_IN, str(fd)]


class Driver(FakeDriver):
    """A driver whose readings of free memory fall by `takes` bytes each."""

    takes = 0
    readings = 0

    def free_bytes(self) -> int:
        self.readings += 1
        return super().free_bytes() - self.takes * self.readings


@pytest.fixture
def memory() -> FakeVirtualMemory:
    return FakeVirtualMemory()


@pytest.fixture
def cuda(memory: FakeVirtualMemory) -> Driver:
    found = Driver(1, memory)
    found.use(0)
    return found


@pytest.fixture(autouse=True)
def _leaves_nothing(memory: FakeVirtualMemory) -> Iterator[None]:
    yield
    assert (memory.reservations, memory.mappings, memory.handles) == ({}, {}, {})


def test_mapping_is_timed_for_each_round(memory: FakeVirtualMemory) -> None:
    found = measure_mapping(memory, 0, UNITS, GRANULARITY, 3)
    assert found.keys() == {"create", "map", "unmap"}
    assert all(ms > 0 for ms in found.values())


def test_processes_share_one_copy(cuda: Driver, memory: FakeVirtualMemory) -> None:
    found = measure_sharing(cuda, memory, 0, UNITS, GRANULARITY, 2, command)
    assert (found["added_part"], found["engines"]) == (0.0, 2.0)
    assert found["import_ms"] > 0


def test_memory_that_processes_add_is_counted(cuda: Driver, memory: FakeVirtualMemory) -> None:
    cuda.takes = GRANULARITY
    found = measure_sharing(cuda, memory, 0, UNITS, GRANULARITY, 1, command)
    assert found["added_part"] == pytest.approx(1 / UNITS)


def test_wrong_bytes_are_an_error(cuda: Driver, memory: FakeVirtualMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap, "write_marks", lambda *_: None)
    with pytest.raises(DeviceFailed, match="other bytes"):
        measure_sharing(cuda, memory, 0, UNITS, GRANULARITY, 1, command)


def test_a_process_that_ends_is_an_error() -> None:
    with pytest.raises(DeviceFailed, match="has ended"):
        MappingProcess(lambda fd: [sys.executable, "-c", "pass", str(fd)])


def test_a_process_maps_again_what_it_has_unmapped(cuda: Driver, memory: FakeVirtualMemory) -> None:
    with (
        marked_units(cuda, memory, 0, UNITS, GRANULARITY) as descriptors,
        contextlib.closing(MappingProcess(command)) as process,
    ):
        for _ in range(2):
            assert process.map(descriptors, GRANULARITY) > 0
            assert process.read() == digest_of(UNITS)
            assert process.unmap() >= 0


@pytest.mark.parametrize("refuses", [True, False])
def test_results_with_mapped_memory_and_without_are_distinct(cuda: Driver, memory: FakeVirtualMemory, refuses: bool) -> None:
    driver = FakeCheckpoint({})

    def start() -> MappingProcess:
        process = MappingProcess(command)
        if refuses and not driver.states:
            driver.fails.add(("checkpoint", process.pid))
        driver.states[process.pid] = State.RUNNING
        return process

    with marked_units(cuda, memory, 0, UNITS, GRANULARITY) as descriptors:
        found = measure_mapped(driver, descriptors, GRANULARITY, start)
    assert found == {"with_mapped_memory": 0.0 if refuses else 1.0, "after_detaching": 1.0}
    assert set(driver.states.values()) == {State.RUNNING}, "a refused process runs on"


class NoGroups(Cgroups):
    """Processes without a cgroup."""

    def __init__(self) -> None:
        super().__init__("n", None, None, "none here")

    def gather(
        self, instance_id: str, host: int, *, include_host: bool, others: tuple[int, ...] = (), in_container: bool = False
    ) -> tuple[int, ...]:
        return (host,)


@dataclass
class Holder:
    """A process of the stand-in: it computes something else after a faulty restore."""

    pid: int
    driver: FakeCheckpoint
    is_faulty: bool = False

    def ask(self) -> str:
        assert self.driver.states[self.pid] is State.RUNNING
        return str(len(self.driver.calls)) if self.is_faulty else "same"


async def sizes_on(driver: FakeCheckpoint, *, is_faulty: bool = False) -> dict[str, float]:
    gpu, groups, pids = FakeGpu(driver), NoGroups(), iter(range(7_000_001, 7_000_010))

    @contextlib.contextmanager
    def start(size: int) -> Iterator[Holder]:
        pid = next(pids)
        driver.held[pid], driver.states[pid] = size, State.RUNNING
        yield Holder(pid, driver, is_faulty)
        del driver.held[pid]

    way = CudaCheckpoint(driver, "", groups, MemoryUsage({"cuda:0": gpu}))
    return await measure_sizes(way, groups, lambda: gpu.used_bytes(0, 0), "cuda:0", [4_000_000, 1_000_000], start)


async def test_processes_of_each_size_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_cuda, "available_bytes", lambda: 1 << 40)
    driver = FakeCheckpoint({})
    found = await sizes_on(driver)
    assert {"suspend_0.001_gb_ms", "restore_0.001_gb_ms", "suspend_0.004_gb_ms", "restore_0.004_gb_ms"} <= found.keys()
    assert found["freed_part"] == 1.0
    assert found["restore_gb_per_s"] == pytest.approx(0.004 / found["restore_0.004_gb_ms"] * 1e3), "of the largest"
    assert [name for name, _ in driver.calls] == ["lock", "checkpoint", "restore", "unlock"] * 2


async def test_a_process_that_computes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspend_cuda, "available_bytes", lambda: 1 << 40)
    with pytest.raises(DeviceFailed, match="computes something else"):
        await sizes_on(FakeCheckpoint({}), is_faulty=True)


def test_without_a_gpu_the_steps_return_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise DeviceMissing("No CUDA device can be used here")

    monkeypatch.setattr(remap, "load_cuda", missing)
    monkeypatch.setattr(checkpoint, "load_nvml", lambda: None)
    assert remap.main([]) == NOTHING_MEASURED
    assert checkpoint.main([]) == NOTHING_MEASURED
    assert "No CUDA device" in capsys.readouterr().out
