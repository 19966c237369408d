"""A GPU whose driver does not respond costs its node only that GPU."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.nodeagent import app
from services.nodeagent.adapters.meter import Meter
from services.nodeagent.devices import inventory
from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from services.nodeagent.devices.driver_thread import DriverThread
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.suspend import factory
from shared.errors import DeviceFailed, DeviceMissing
from tests.unit.nodeagent.world import World

PID = 7


class Nvml:
    """Two GPUs of 100 bytes; each call about those in `lost` fails as NVML's do."""

    NVMLError = pynvml.NVMLError
    NVML_ERROR_NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED

    def __init__(self, *lost: int) -> None:
        self.lost = set(lost)
        self.used = 60
        self.accounts: int | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.calls: list[int] = []

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._answered(index, index)

    def nvmlDeviceGetName(self, index: int) -> Any:
        return self._answered(index, "fake")

    def nvmlDeviceGetUUID(self, index: int) -> Any:
        return self._answered(index, f"GPU-{index}")

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        return self._answered(index, SimpleNamespace(total=100, used=self.used))

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> Any:
        if self.accounts is not None:
            raise pynvml.NVMLError(self.accounts)
        return self._answered(index, [SimpleNamespace(pid=PID, usedGpuMemory=self.used)])

    def _answered(self, index: int, answer: Any) -> Any:
        self.calls.append(index)
        self.answers.wait(60)
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return answer


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    def open_them(nvml: Nvml, devices: str) -> list[str]:
        monkeypatch.setattr(inventory, "load_nvml", lambda _: nvml)
        settings = NodeagentSettings(devices=devices, home=tmp_path)
        return list(inventory.open_devices(settings, tmp_path / "budgets.json", adopting=False))

    return open_them


def test_lost_gpu_is_omitted_from_automatic_devices(opened: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    assert opened(Nvml(), "auto") == ["cpu:0", "cuda:0", "cuda:1"]
    assert opened(Nvml(0), "auto") == ["cpu:0", "cuda:1"]
    assert "a device is left out" in caplog.text


def test_lost_gpu_requested_by_name_is_an_error(opened: Callable[..., list[str]]) -> None:
    assert opened(Nvml(0), "cuda:1") == ["cuda:1"]
    with pytest.raises(DeviceMissing, match=r"names cuda:0: NVML cannot read cuda:0.*nvidia-smi"):
        opened(Nvml(0), "cpu:0=1GiB,cuda:0")


@pytest.fixture
def nvml() -> Nvml:
    return Nvml()


@pytest.fixture
def world() -> World:
    found = World("cuda:0")
    found.ready("a", PID, reserve=20, devices=("cuda:0",))
    return found


@pytest.fixture
def meter(world: World, nvml: Nvml) -> Meter:
    return Meter({"cuda:0": CudaDevice(nvml, 0, None, None)}, lambda: world.state, lambda: None, lambda *_: None)


async def test_last_measurement_is_kept_while_the_gpu_is_lost(meter: Meter, nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    def generated() -> int:
        return sum(r.levelno == logging.ERROR for r in caplog.records)

    await meter.measure_all()
    assert (meter.get_private("a"), meter.get_used("cuda:0"), generated()) == (60, 60, 0)
    nvml.lost = {0}
    for _ in range(3):
        await meter.measure_all()
    assert (meter.get_private("a"), meter.get_used("cuda:0"), generated()) == (60, 60, 2), "each reading is logged once"
    nvml.lost, nvml.used = set(), 40
    await meter.measure_all()
    assert (meter.get_private("a"), meter.get_used("cuda:0"), generated()) == (40, 40, 2)


async def test_lost_gpu_verifies_no_freed_memory(meter: Meter, nvml: Nvml, world: World) -> None:
    before = await meter.loader_holds("a")
    nvml.lost = {0}
    with pytest.raises(DeviceFailed):
        await meter.wait_memory_freed(world["a"])
    with pytest.raises(DeviceFailed):
        await meter.loader_holds("a")
    assert not await meter.wait_memory_returned("a", before, 20)


async def test_stop_does_not_wait_if_the_driver_lists_no_processes(meter: Meter, nvml: Nvml, world: World) -> None:
    nvml.accounts = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert await meter.wait_memory_freed(world["a"]) == 0


async def test_repeated_reading_failure_is_logged_once(meter: Meter, nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.accounts = pynvml.NVML_ERROR_UNKNOWN
    for _ in range(3):
        await meter.measure_all()
    assert meter.get_used("cuda:0") == 60
    assert sum(r.levelno == logging.ERROR for r in caplog.records) == 1


async def test_driver_that_hangs_keeps_one_thread_and_one_call(world: World, nvml: Nvml) -> None:
    """The agent has a few threads, in which it also ends processes and reads logs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    device = CudaDevice(nvml, 0, None, None, DriverThread(1.0))
    meter = Meter({"cuda:0": device}, lambda: world.state, lambda: None, lambda *_: None)
    await meter.measure_all()
    nvml.answers.clear()
    nvml.calls.clear()
    try:
        await asyncio.wait_for(asyncio.gather(*(meter.measure_all() for _ in range(4))), 30)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 30) == 1
        assert len(nvml.calls) == 1
        with pytest.raises(DeviceFailed, match="no answer within 1 s"):
            await meter.wait_memory_freed(world["a"])
        assert (meter.get_private("a"), meter.get_used("cuda:0")) == (60, 60)
    finally:
        nvml.used = 40
        nvml.answers.set()
    async with asyncio.timeout(60):
        while (meter.get_private("a"), meter.get_used("cuda:0")) != (40, 40):
            await meter.measure_all()


@pytest.fixture
def hanging_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVML whose initialisation does not return; it gets half a second."""
    ends = threading.Event()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: ends.wait(60))
    monkeypatch.setattr(inventory, "load_nvml", partial(load_nvml, within_s=0.5))
    yield
    ends.set()


@pytest.mark.usefixtures("hanging_nvml")
def test_node_starts_without_gpus_if_nvml_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = NodeagentSettings(devices="auto", home=tmp_path)
    assert set(inventory.open_devices(settings, tmp_path / "budgets.json", adopting=False, nodes=())) == {"cpu:0"}
    assert "all GPUs are left out" in caplog.text
    named = NodeagentSettings(devices="cpu:0=1GiB,cuda:0", home=tmp_path)
    with pytest.raises(DeviceMissing, match=r"names GPUs: NVML cannot read the driver: no answer within 0.5 s.*nvidia-smi"):
        inventory.open_devices(named, tmp_path / "budgets.json", adopting=False)


def test_gpu_that_the_driver_has_to_initialise_is_not_left_out(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    """Without persistence mode that takes seconds."""

    def initialise(index: int) -> int:
        time.sleep(1.2)
        return index

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", initialise)
    assert CudaDevice(nvml, 0, None, None, DriverThread(1.0)).info.device_id == "cuda:0"


def test_node_without_answer_from_the_cuda_driver_makes_no_checkpoints(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, tmp_path: Path
) -> None:
    ends = threading.Event()
    monkeypatch.setattr(factory, "load_nvml", lambda *_: nvml)
    monkeypatch.setattr(factory, "open_driver", lambda _: ends.wait(60))
    devices = {"cuda:0": CudaDevice(nvml, 0, None, None)}
    try:
        found = factory.open_checkpoints(NodeagentSettings(home=tmp_path), devices, 0.5)
    finally:
        ends.set()
    assert found is not None
    assert found.driver is None
    assert "does not answer within 0.5 s" in found.reason


async def test_agent_runs_while_a_driver_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its supervisor would take it for hung."""
    has_run = threading.Event()

    def open_slowly(*_: object, **__: object) -> None:
        assert has_run.wait(10)
        raise DeviceMissing("no GPU")

    monkeypatch.setattr(app, "open_devices", open_slowly)
    asyncio.get_running_loop().call_later(0.01, has_run.set)
    assert await app.run(NodeagentSettings(home=tmp_path, zygote=False), asyncio.Event()) == 2
