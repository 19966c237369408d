"""The loader's devices on a real GPU: `python -m pytest tests/gpu`.

They behave as the stand-in does; IPC works between processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.errors import DeviceMissing, InsufficientMemory
from tests.support.stopping import killed_at_exit
from tests.unit.loader.devices.behaviour import PAGE, SEGMENT, DeviceBehaviour, Host
from weights.devices.cuda import CudaArena, CudaDevice
from weights.devices.cuda_runtime import CudaRuntime, load_cuda
from weights.devices.port import Arena, Device, Place
from weights.devices.probe import measure

pytestmark = pytest.mark.gpu
READER = """
import hashlib, sys
from services.engine.model.device_segment import open_on_gpu
from shared.contracts.segment import CudaIpcHandle
memory = open_on_gpu(CudaIpcHandle.model_validate_json(sys.stdin.readline()))
print(hashlib.sha256(memory.cpu().numpy().tobytes()).hexdigest(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def cuda() -> CudaRuntime:
    try:
        return load_cuda()
    except DeviceMissing as e:
        pytest.skip(e.message)


class TestRealGpu(DeviceBehaviour):
    @pytest.fixture
    def device(self, cuda: CudaRuntime) -> Iterator[Device]:
        self.cuda = cuda
        device = CudaDevice(cuda, cuda.facts(0), 4 * PAGE)
        yield device
        device.close()

    def read(self, arena: Arena, nbytes: int) -> bytes:
        assert isinstance(arena, CudaArena)
        seen = ctypes.create_string_buffer(nbytes)
        self.cuda.use(0)
        self.cuda.copy_back(ctypes.addressof(seen), arena.address, nbytes)
        return seen.raw

    def test_another_process_opens_the_handle_and_sees_the_bytes(self, arena: Arena, host: Host) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch here has no CUDA")
        arena.fill(0, host.address, SEGMENT)
        assert arena.wait(SEGMENT)
        handle = arena.handle()
        assert handle is not None
        with killed_at_exit(
            subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(handle.model_dump_json() + "\n")
            reader.stdin.flush()
            assert reader.stdout.readline().strip() == hashlib.sha256(host.content).hexdigest()
            reader.stdin.close()
            assert reader.wait(30) == 0

    def test_released_memory_is_free(self, device: Device, cuda: CudaRuntime) -> None:
        cuda.use(0)
        before = cuda.free_bytes()
        arena = device.allocate(Place("big", 512 << 20, "thaw-test"))
        assert cuda.free_bytes() <= before - (512 << 20)
        arena.release()
        assert cuda.free_bytes() > before - (256 << 20)

    def test_allocation_beyond_the_device_memory_fails(self, device: Device, cuda: CudaRuntime) -> None:
        with pytest.raises(InsufficientMemory, match="cudaMalloc"):
            device.allocate(Place("huge", cuda.facts(0).total_bytes * 2, "thaw-test"))


def test_probe_throughput_rises_with_size(cuda: CudaRuntime) -> None:
    points = measure(cuda, cuda.facts(0), (64 << 10, 1 << 20, 16 << 20), 64 << 20)
    assert points[0].bytes_per_second < points[-1].bytes_per_second
