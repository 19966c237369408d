"""Call CUDA by cuda-bindings (the extra `cuda`).

Names and signatures are checked against its versions 12.9 and 13.5.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from shared.errors import DeviceFailed, DeviceMissing, InsufficientMemory
from weights.devices.driver import IPC_HANDLE_BYTES, DeviceFacts, Event, Stream

_BUS_ID_CHARS = 32


class CudaRuntime:
    """Thread-safe, as CUDA's runtime is.

    Contexts are the devices' primary ones, which torch uses too.
    """

    def __init__(self, runtime: Any) -> None:
        self._rt = runtime
        self._out_of_memory = runtime.cudaError_t.cudaErrorMemoryAllocation

    def count(self) -> int:
        return int(self._call(self._rt.cudaGetDeviceCount))

    def facts(self, index: int) -> DeviceFacts:
        self.use(index)
        bus_id = self._call(self._rt.cudaDeviceGetPCIBusId, _BUS_ID_CHARS, index).split(b"\0")[0].decode().lower()
        _, total = self._call(self._rt.cudaMemGetInfo)
        return DeviceFacts(index, bus_id, int(total), int(self._call(self._rt.cudaDriverGetVersion)))

    def use(self, index: int) -> None:
        self._call(self._rt.cudaSetDevice, index)

    def free_bytes(self) -> int:
        free, _ = self._call(self._rt.cudaMemGetInfo)
        return int(free)

    def allocate(self, nbytes: int) -> int:
        return int(self._call(self._rt.cudaMalloc, nbytes))

    def free(self, address: int) -> None:
        self._call(self._rt.cudaFree, address)

    def export(self, address: int) -> bytes:
        # cuda-bindings 13.5 has no attribute for the handle's bytes, earlier ones have: its address
        # is the same in all.
        handle = self._call(self._rt.cudaIpcGetMemHandle, address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise DeviceFailed(f"A CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, not {len(handle)}")
        opened = self._rt.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_BYTES)
        return int(self._call(self._rt.cudaIpcOpenMemHandle, opened, self._rt.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        self._call(self._rt.cudaIpcCloseMemHandle, address)

    def register(self, address: int, nbytes: int) -> None:
        self._call(self._rt.cudaHostRegister, address, nbytes, self._rt.cudaHostRegisterPortable)

    def unregister(self, address: int) -> None:
        self._call(self._rt.cudaHostUnregister, address)

    def stream(self, *, urgent: bool) -> Stream:
        least, greatest = self._call(self._rt.cudaDeviceGetStreamPriorityRange)
        priority = greatest if urgent else least
        made = self._call(self._rt.cudaStreamCreateWithPriority, self._rt.cudaStreamNonBlocking, priority)
        return Stream(made)

    def destroy_stream(self, stream: Stream) -> None:
        self._call(self._rt.cudaStreamDestroy, stream)

    def copy(self, to_device: int, from_host: int, nbytes: int, stream: Stream) -> None:
        kind = self._rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call(self._rt.cudaMemcpyAsync, to_device, from_host, nbytes, kind, stream)

    def can_access_peer(self, index: int, peer: int) -> bool:
        return bool(self._call(self._rt.cudaDeviceCanAccessPeer, index, peer))

    def copy_from_peer(self, to_device: int, index: int, from_device: int, peer: int, nbytes: int, stream: Stream) -> None:
        self._call(self._rt.cudaMemcpyPeerAsync, to_device, index, from_device, peer, nbytes, stream)

    def copy_back(self, to_host: int, from_device: int, nbytes: int) -> None:
        self._call(self._rt.cudaMemcpy, to_host, from_device, nbytes, self._rt.cudaMemcpyKind.cudaMemcpyDeviceToHost)

    def record(self, stream: Stream) -> Event:
        flags = self._rt.cudaEventBlockingSync | self._rt.cudaEventDisableTiming
        event = self._call(self._rt.cudaEventCreateWithFlags, flags)
        self._call(self._rt.cudaEventRecord, event, stream)
        return Event(event)

    def wait(self, event: Event) -> None:
        try:
            self._call(self._rt.cudaEventSynchronize, event)
        finally:
            self._rt.cudaEventDestroy(event)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """cuda-bindings returns (status, *results): the one result, all of them, or None."""
        status, *results = function(*arguments)
        if status == self._rt.cudaError_t.cudaSuccess:
            return results[0] if len(results) == 1 else (tuple(results) or None)
        _, words = self._rt.cudaGetErrorString(status)
        message = f"{function.__name__}: {words.decode()} ({status.name})"
        if status == self._out_of_memory:
            raise InsufficientMemory(f"{message}; put other models to sleep, or give them less memory", should_retry=True)
        raise DeviceFailed(message)


def load_cuda() -> CudaRuntime:
    """Load CUDA.

    Raises:
        DeviceMissing: The package, a driver or a device is missing; the message has the remedy.
    """
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError as e:
        raise DeviceMissing("CUDA needs the package cuda-bindings: pip install 'thaw-mesh[cuda]'") from e
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess:
        _, words = runtime.cudaGetErrorString(status)
        raise DeviceMissing(f"No CUDA device can be used here: {words.decode()} (nvidia-smi shows what the driver sees)")
    if not count:
        raise DeviceMissing("No CUDA device is visible here (CUDA_VISIBLE_DEVICES, nvidia-smi)")
    return CudaRuntime(runtime)
