"""The installed cuda-bindings has every name and signature that Thaw uses.

Without a driver each call reports that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shared.errors import DeviceFailed, DeviceMissing
from weights.devices.cuda_runtime import CudaRuntime, load_cuda
from weights.devices.driver import Event, Stream


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(DeviceMissing, match=r"pip install 'thaw-mesh\[cuda\]'"):
        load_cuda()


class TestWithoutADriver:
    module: Any

    @pytest.fixture
    def runtime(self) -> CudaRuntime:
        module = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings (the extra cuda) is not installed")
        if module.cudaGetDeviceCount()[0] == module.cudaError_t.cudaSuccess:
            pytest.skip("this machine has a CUDA driver: tests/gpu runs the real calls")
        self.module = module
        return CudaRuntime(module)

    def test_missing_driver_is_reported_on_load(self, runtime: CudaRuntime) -> None:
        with pytest.raises(DeviceMissing, match=r"No CUDA device can be used here: .*driver"):
            load_cuda()

    def test_every_runtime_call_exists_in_the_package(self, runtime: CudaRuntime) -> None:
        """Every call exists in the package.

        Wrong names and arguments are AttributeErrors and TypeErrors; right ones reach the missing
        driver.
        """
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        anchor = ctypes.c_char.from_buffer(memory)
        address, size = ctypes.addressof(anchor), mmap.PAGESIZE
        stream, event = Stream(self.module.cudaStream_t(0)), Event(self.module.cudaEvent_t(0))
        calls: dict[str, Callable[[], object]] = {
            "cudaGetDeviceCount": lambda: runtime.count(),
            "cudaSetDevice": lambda: runtime.facts(0),
            "cudaMemGetInfo": runtime.free_bytes,
            "cudaMalloc": lambda: runtime.allocate(size),
            "cudaFree": lambda: runtime.free(0),
            "cudaIpcGetMemHandle": lambda: runtime.export(address),
            "cudaIpcOpenMemHandle": lambda: runtime.open(bytes(64)),
            "cudaIpcCloseMemHandle": lambda: runtime.close(address),
            "cudaHostRegister": lambda: runtime.register(address, size),
            "cudaHostUnregister": lambda: runtime.unregister(address),
            "cudaDeviceGetStreamPriorityRange": lambda: runtime.stream(urgent=True),
            "cudaMemcpyAsync": lambda: runtime.copy(address, address, size, stream),
            "cudaDeviceCanAccessPeer": lambda: runtime.can_access_peer(0, 1),
            "cudaMemcpyPeerAsync": lambda: runtime.copy_from_peer(address, 0, address, 1, size, stream),
            "cudaMemcpy": lambda: runtime.copy_back(address, address, size),
            "cudaEventCreateWithFlags": lambda: runtime.record(stream),
            "cudaEventSynchronize": lambda: runtime.wait(event),
            "cudaStreamDestroy": lambda: runtime.destroy_stream(stream),
        }
        for name, call in calls.items():
            with pytest.raises(DeviceFailed, match=f"^{name}: .*cudaErrorInsufficientDriver"):
                call()

    def test_remaining_runtime_names_exist_in_the_package(self, runtime: CudaRuntime) -> None:
        for name in ("cudaDeviceGetPCIBusId", "cudaStreamCreateWithPriority", "cudaEventRecord", "cudaEventDestroy"):
            assert callable(getattr(self.module, name))
        assert self.module.cudaDriverGetVersion()[0] == self.module.cudaError_t.cudaSuccess
        assert isinstance(self.module.cudaStreamNonBlocking, int)

    def test_a_handle_of_another_length(self, runtime: CudaRuntime) -> None:
        with pytest.raises(DeviceFailed, match="64 bytes, not 3"):
            runtime.open(b"abc")
