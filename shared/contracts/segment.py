"""Define the layout of a weight segment in shared memory.

The loader writes segments, and engines read them.

    page 0            `SegmentHeader` as JSON, zero-padded to HEADER_BYTES
    index_offset      `SegmentIndex` as JSON, index_bytes long
    data_offset …     the weight files, each from a page boundary, byte for byte as on disk (headers
                      included)

Header and index are complete before a reader learns the segment's name; the data may still be
arriving (`AttachWeights(until="complete")` is answered when it is complete). Tensor offsets are
from the start of the segment. Readers map the segment read-only or copy-on-write.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shared.contracts.base import Frozen

MAGIC = "thaw-segment"
LAYOUT_VERSION = 1
PAGE = 4096
HEADER_BYTES = PAGE


class Extent(Frozen):
    """A run of neighbouring chunks of the pool.

    A segment is its extents one after the other.
    """

    offset: int = Field(ge=0, description="In the pool's file, a multiple of the page size.")
    nbytes: int = Field(gt=0)


class SegmentHeader(Frozen):
    magic: str = MAGIC
    version: int = LAYOUT_VERSION
    weights_id: str
    index_offset: int = HEADER_BYTES
    index_bytes: int
    data_offset: int
    total_bytes: int = Field(description="Of the whole segment.")


class TensorCut(Frozen):
    """The range of a whole tensor that a rank has: `start` on, along dimension `dim`.

    Attributes:
        length: Of the whole tensor along `dim`.
    """

    dim: int = Field(ge=0)
    start: int = Field(ge=0)
    length: int = Field(gt=0)


class SegmentTensor(Frozen):
    """`dtype` as safetensors names it (F32, BF16, F16, I64, U8, BOOL, F8_E4M3 …).

    `shape` and `nbytes` are those of the bytes in the segment. `cut`: these are a range of the
    tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    cut: TensorCut | None = None


class SegmentIndex(Frozen):
    tensors: tuple[SegmentTensor, ...]
    files: tuple[str, ...] = ()


class SharedMemoryHandle(Frozen):
    """A segment to map in place: a file under /dev/shm, or these extents of it."""

    kind: Literal["shared-memory"] = "shared-memory"
    device: str
    nbytes: int
    segment: str
    extents: tuple[Extent, ...] = ()


class CudaIpcHandle(Frozen):
    """A segment in a GPU's memory, owned by the loader.

    `bus_id` names the GPU in every process (`cudaDeviceGetByPCIBusId`).
    """

    kind: Literal["cuda-ipc"] = "cuda-ipc"
    device: str
    nbytes: int
    bus_id: str
    ipc_handle: str = Field(description="The 64 bytes of cudaIpcMemHandle_t, as Base64.")


class MappedUnit(Frozen):
    """Bytes [offset, offset + nbytes) of a segment, which begin at `start` of the mapped range."""

    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)
    start: int = Field(ge=0)


class ByteRange(Frozen):
    """Bytes [offset, offset + nbytes) of a segment."""

    offset: int = Field(ge=0)
    nbytes: int = Field(gt=0)


class PagesLayout(Frozen):
    """The address range for a segment's units on a device, before all of them are there."""

    device: str
    nbytes: int = Field(description="Length of the range.")
    file: str = Field(description="As of `PagesHandle`.")
    units: tuple[MappedUnit, ...]
    bus_id: str | None = Field(
        default=None, description="As of `CudaIpcHandle`: the units are a GPU's, each with a descriptor; None: pages of `file`."
    )
    lends_kv: bool = Field(default=False, description="KV caches borrow pages of the device.")


class UnitPages(Frozen):
    """The pages of one unit of a segment."""

    unit: int = Field(ge=0, description="Number of the unit in the order of their offsets.")
    extents: tuple[Extent, ...] = Field(description="Of the device's file, in order; whole pages.")


class PagesHandle(Frozen):
    """The units of a segment in the pages of a device with memory of its own.

    An engine maps the `extents` of the file one after the other, and finds each unit at its start.
    """

    kind: Literal["pages"] = "pages"
    device: str
    nbytes: int = Field(description="Length of the mapped range.")
    file: str = Field(description="Name under /dev/shm; another one after each start of the loader.")
    extents: tuple[Extent, ...]
    units: tuple[MappedUnit, ...] = Field(description="In the order of their offsets. They hold every tensor.")


class GpuUnitsHandle(Frozen):
    """The units of a segment in a GPU's memory, each in an allocation of its own.

    An engine asks for their descriptors over the loader's local socket (`SocketMap`), and maps each
    unit at its start in one range of `nbytes`. `bus_id` as in `CudaIpcHandle`.
    """

    kind: Literal["gpu-units"] = "gpu-units"
    device: str
    nbytes: int = Field(description="Length of the mapped range.")
    bus_id: str
    units: tuple[MappedUnit, ...] = Field(description="In the order of their offsets. They hold every tensor.")
    lends_kv: bool = Field(default=False, description="KV caches borrow pages of the device.")


ArenaHandle = Annotated[SharedMemoryHandle | CudaIpcHandle | PagesHandle | GpuUnitsHandle, Field(discriminator="kind")]


def segment_prefix(home: Path, node: str) -> str:
    """The common prefix of the names of a node's segments under /dev/shm."""
    digest = hashlib.sha256(f"{home.expanduser().resolve()}\0{node}".encode()).hexdigest()[:8]
    return f"thaw-{digest}-"
