"""A weight segment in GPU memory that the loader owns.

It is opened by IPC handle and seen as tensors without a copy.
"""

from __future__ import annotations

import base64
import ctypes
import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from services.engine.model.segment import SHARED_MEMORY, Segment
from shared.contracts.segment import CudaIpcHandle, GpuUnitsHandle, PagesHandle, PagesLayout, SegmentIndex, SegmentTensor
from shared.errors import CheckpointInvalid, EngineFailed
from shared.mapping import map_extents


class DeviceSegment:
    """The whole segment as bytes (`base`) with the locations of its tensors (`index`).

    Tensors keep the memory open.
    """

    def __init__(self, base: torch.Tensor, index: SegmentIndex, dtypes: Mapping[str, torch.dtype]) -> None:
        """Describe the segment.

        Args:
            base: The segment's bytes on the device.
            index: The tensors' places in it.
            dtypes: torch's types by safetensors' type names.
        """
        self._base, self._index, self._dtypes = base, index, dtypes
        self._start = base.data_ptr()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name.

        Compute only after the loader has reported that all bytes are loaded.

        Raises:
            CheckpointInvalid: The index does not fit the memory.
        """
        return {t.name: self._tensor(t) for t in self._index.tensors}

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the memory of `tensor` is in the segment."""
        return tensor.device == self._base.device and self._start <= tensor.data_ptr() < self._start + self._base.numel()

    def _tensor(self, t: SegmentTensor) -> torch.Tensor:
        dtype = self._dtypes.get(t.dtype)
        if dtype is None:
            raise CheckpointInvalid(f"Tensor {t.name} has the unknown type {t.dtype}")
        count = math.prod(t.shape)
        if count * dtype.itemsize != t.nbytes or t.offset < 0 or t.offset + t.nbytes > self._base.numel():
            raise CheckpointInvalid(
                f"Tensor {t.name} of shape {list(t.shape)} and type {t.dtype} does not fit its {t.nbytes} bytes"
            )
        if count == 0:
            return torch.empty(t.shape, dtype=dtype, device=self._base.device)
        if t.offset % dtype.itemsize:
            # Old files do not pad their headers. A copy would be made before the bytes are loaded.
            raise CheckpointInvalid(
                f"Tensor {t.name} does not start at a multiple of its {dtype.itemsize} bytes: thaw convert aligns it"
            )
        return self._base[t.offset : t.offset + t.nbytes].view(dtype).view(t.shape)


def rebind(
    model: torch.nn.Module, offset_of: Callable[[torch.Tensor], int | None], base: torch.Tensor, *, is_loaded: bool = False
) -> int:
    """Rebind the model's tensors to `base`, the segment's bytes on a device.

    Tensors outside the segment are copied to the device, and so are those that are not aligned
    there.

    Args:
        model: The model.
        offset_of: Offset of a tensor in the segment, or None.
        base: The segment's bytes.
        is_loaded: `base` has all bytes, so that unaligned tensors can be copied from it. Otherwise
            they are copied from the device.

    Returns:
        The number of bytes copied.
    """
    copied = 0

    def move_tensor(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        offset = offset_of(tensor)
        if offset is not None and offset % tensor.itemsize and is_loaded and tensor.is_contiguous():
            copied += tensor.nbytes
            return base[offset : offset + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
        if offset is None or offset % tensor.itemsize:  # converted, computed, or misaligned for kernels
            copied += tensor.nbytes if tensor.device != base.device else 0
            return tensor.to(base.device)
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = base[offset : offset + (last + 1) * tensor.itemsize]
        return span.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    # As `Module.to` with another function: tied parameters stay tied.
    model._apply(move_tensor)  # type: ignore[no-untyped-call]  # torch gives it no types
    return copied


class _Opened:
    """Memory that torch did not allocate, as `__cuda_array_interface__`.

    torch keeps a reference while it uses the memory.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def open_on_gpu(handle: CudaIpcHandle) -> torch.Tensor:
    """Map the memory of `handle` as bytes on the device with its PCI bus id.

    The mapping is closed with the last tensor that refers to it. CUDA forbids a process to open its
    own exports.

    Raises:
        EngineFailed: The memory cannot be opened.
    """
    runtime = _runtime()
    raw = base64.b64decode(handle.ipc_handle)
    if len(raw) != _HANDLE_BYTES:
        raise EngineFailed(f"A CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(raw)}")
    with current_gpu(handle.bus_id) as device:
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), raw, _HANDLE_BYTES)
        address = int(_call(runtime, runtime.cudaIpcOpenMemHandle, opened, runtime.cudaIpcMemLazyEnablePeerAccess))
        seen, owner = see_as_bytes(address, handle.nbytes, device)
        # At process exit the driver closes it, because the runtime may be unloaded already.
        weakref.finalize(owner, runtime.cudaIpcCloseMemHandle, address).atexit = False
        return seen


@contextmanager
def current_gpu(bus_id: str) -> Iterator[torch.device]:
    """Use the GPU with this PCI bus id in this thread.

    Raises:
        EngineFailed: There is no such GPU, or the package cuda-bindings is missing.
    """
    runtime = _runtime()
    device = torch.device("cuda", int(_call(runtime, runtime.cudaDeviceGetByPCIBusId, bus_id.encode())))
    with torch.cuda.device(device):
        # cuda-bindings has its own runtime: both must use the device's primary context.
        _call(runtime, runtime.cudaSetDevice, device.index)
        yield device


def see_as_bytes(address: int, nbytes: int, device: torch.device) -> tuple[torch.Tensor, object]:
    """Return the device's memory as a tensor, and the object that lives as long as its users."""
    owner = _Opened(address, nbytes)
    return torch.as_tensor(owner, device=device), owner


def open_pages(handle: PagesHandle) -> torch.Tensor:
    """Map the pages of `handle` as one range of bytes on the CPU.

    The mapping is private: a write stays in this process. It is closed with the last tensor.

    Raises:
        EngineFailed: The file is gone: its loader has ended.
    """
    path = SHARED_MEMORY / handle.file
    try:
        mapped = map_extents(path, handle.extents)
        # A new loader renames the file before it frees the pages that no process maps: if the name
        # is there now, that loader sees this mapping.
        path.stat()
    except (OSError, ValueError) as e:
        raise EngineFailed(f"The pages of {handle.device} cannot be mapped ({e}). Start the instance again") from e
    if len(mapped) != handle.nbytes:
        raise EngineFailed(f"The pages of {handle.device} have {len(mapped)} bytes instead of {handle.nbytes}")
    return torch.frombuffer(mapped, dtype=torch.uint8)


def offsets_in_pages(
    handle: PagesHandle | GpuUnitsHandle | PagesLayout, offset_of: Callable[[torch.Tensor], int | None]
) -> Callable[[torch.Tensor], int | None]:
    """Return the function from a tensor to its offset in the mapped range.

    Args:
        handle: The units, and where they are.
        offset_of: Offset of a tensor in the segment, or None.
    """
    offsets = [u.offset for u in handle.units]

    def place(tensor: torch.Tensor) -> int | None:
        offset = offset_of(tensor)
        at = bisect_right(offsets, offset) - 1 if offset is not None else -1
        if offset is None or at < 0 or offset >= offsets[at] + handle.units[at].nbytes:
            return None
        return handle.units[at].start + offset - offsets[at]

    return place


def tensors_in_pages(handle: PagesHandle, segment: Segment, memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the segment's tensors by name, where their bytes are the device's.

    Args:
        handle: The units, and where they are.
        segment: The head in host memory; other bytes of it are not read.
        memory: The mapped pages.
    """
    read = tensor_in_pages(handle, segment, memory)
    return {name: read(name) for name in segment.names()}


def tensor_in_pages(
    handle: PagesHandle | GpuUnitsHandle | PagesLayout, segment: Segment, memory: torch.Tensor
) -> Callable[[str], torch.Tensor]:
    """Return the function from a tensor's name to the tensor, where its bytes are the device's.

    A tensor that is not aligned in the range is copied, so that its bytes have to be there.
    """
    place = offsets_in_pages(handle, segment.offset_of)

    def read(name: str) -> torch.Tensor:
        tensor = segment.tensor(name)
        at = place(tensor) if tensor.numel() else None
        if at is None:
            return tensor
        span = memory[at : at + tensor.nbytes]
        return (span.clone() if at % tensor.itemsize else span).view(tensor.dtype).view(tensor.shape)

    return read


_HANDLE_BYTES = 64


def _runtime() -> Any:
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as e:
        raise EngineFailed("Weights on a GPU need the package cuda-bindings: pip install 'thaw-mesh[cuda]'") from e


def _call(runtime: Any, function: Any, *arguments: Any) -> Any:
    status, *results = function(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        _, message = runtime.cudaGetErrorString(status)
        raise EngineFailed(
            f"{function.__name__}: {message.decode()} ({status.name}); the loader's GPU memory cannot be opened here"
        )
    return results[0] if results else None
