"""CUDA devices through NVML, on a machine with one: `python -m pytest tests/gpu`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.nodeagent.devices.cuda import CudaDevice, load_nvml
from tests.support.stopping import killed_at_exit

pytestmark = pytest.mark.gpu
MIB = 1024 * 1024


@pytest.fixture
def device() -> CudaDevice:
    nvml = load_nvml()
    if nvml is None or nvml.nvmlDeviceGetCount() == 0:
        pytest.skip("no NVIDIA driver, or no device that NVML can see")
    return CudaDevice(nvml, 0, 0.9, None)


def test_inventory_names_the_device_and_its_budget(device: CudaDevice) -> None:
    assert device.info.device_id == "cuda:0"
    assert device.info.uuid.startswith("GPU-")
    assert device.info.name
    assert device.info.budget_bytes == int(device.info.total_bytes * 0.9)
    assert 0 <= device.used_bytes(0, 0) <= device.info.total_bytes


def test_memory_of_a_process_is_measured_and_freed_after_its_exit(device: CudaDevice) -> None:
    pytest.importorskip("torch")
    before = device.used_bytes(0, 0)
    code = "import torch, sys; x = torch.zeros(512 << 20, dtype=torch.uint8, device='cuda'); print('held', flush=True); sys.stdin.read()"
    with killed_at_exit(
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ)
    ) as child:
        assert child.stdout is not None
        if child.stdout.readline().strip() != b"held":
            pytest.skip("torch here has no CUDA")
        assert device.used_bytes(0, 0) - before >= 512 * MIB
        measured = device.private_bytes([child.pid])
        child.kill()
    if measured:  # in a pid namespace of its own, this process's pids differ from NVML's
        assert measured[child.pid] >= 512 * MIB
    assert device.private_bytes([child.pid]) == {}
    assert device.used_bytes(0, 0) - before < 512 * MIB
