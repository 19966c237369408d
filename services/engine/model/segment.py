"""A weight segment in shared memory, mapped and seen as tensors without a copy."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from shared.contracts.segment import HEADER_BYTES, LAYOUT_VERSION, MAGIC, Extent, SegmentHeader, SegmentIndex, SegmentTensor
from shared.dtypes import TORCH_NAMES, packed_shape
from shared.errors import CheckpointInvalid
from shared.mapping import map_extents, map_over

SHARED_MEMORY = Path("/dev/shm")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}


class Segment:
    """A mapped segment: one address range over all chunks of the pool that it uses.

    The mapping is private and writable: torch requires writable memory, and a stray write stays in
    this process. On Linux a private page that was never written shows its shared page, so the
    process sees bytes that the loader writes later. Tensors keep the mapping alive.
    """

    def __init__(self, name: str, extents: Sequence[Extent] = (), weights_id: str | None = None) -> None:
        """Map the `extents` of the file `name`; without extents the whole file.

        Raises:
            CheckpointInvalid: The file is no segment of a known version, or holds other weights
                than `weights_id`.
        """
        self._extents = tuple(extents)
        try:
            path = SHARED_MEMORY / name
            self._inode = path.stat().st_ino
            self._map = map_extents(path, self._extents)
            self.header = SegmentHeader.model_validate_json(self._map[:HEADER_BYTES].rstrip(b"\0"))
            end = self.header.index_offset + self.header.index_bytes
            self._index = SegmentIndex.model_validate_json(self._map[self.header.index_offset : end])
        except (OSError, ValueError, ValidationError) as e:
            raise CheckpointInvalid(f"Segment {name} cannot be read: {e}") from e
        if weights_id is not None and self.header.weights_id != weights_id:
            raise CheckpointInvalid(f"Segment {name} holds {self.header.weights_id} and not {weights_id}. Start the instance again")
        if (self.header.magic, self.header.version) != (MAGIC, LAYOUT_VERSION):
            raise CheckpointInvalid(f"Segment {name} has layout {self.header.magic} {self.header.version}, not {LAYOUT_VERSION}")
        self._by_name = {t.name: t for t in self._index.tensors}
        self._start = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    @property
    def addresses(self) -> tuple[int, int]:
        """First and end address of the mapping."""
        return self._start, self._start + len(self._map)

    def is_current(self, name: str, extents: Sequence[Extent] = ()) -> bool:
        """True if these extents of the file are still the mapped ones.

        A later load replaces the file.
        """
        try:
            return (SHARED_MEMORY / name).stat().st_ino == self._inode and tuple(extents) == self._extents
        except OSError:
            return False

    def map_again(self, name: str, extents: Sequence[Extent]) -> None:
        """Map the same, complete segment from another place, at the same addresses.

        Raises:
            CheckpointInvalid: It is another segment, or cannot be mapped.
        """
        other = Segment(name, extents, self.header.weights_id)
        if other._index != self._index:
            raise CheckpointInvalid(
                f"The tensors of {self.header.weights_id} have changed during the load. Start the instance again"
            )
        path = SHARED_MEMORY / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                map_over(self._map, 0, fd, extents or (Extent(offset=0, nbytes=len(self._map)),))
            finally:
                os.close(fd)
        except (OSError, ValueError) as e:
            raise CheckpointInvalid(f"Segment {name} cannot be mapped: {e}") from e
        self._inode, self._extents = other._inode, other._extents

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint by name; their bytes may still be loading."""
        return {t.name: self._tensor(t) for t in self._index.tensors}

    def names(self) -> tuple[str, ...]:
        """Return the names of the checkpoint's tensors."""
        return tuple(self._by_name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor; its bytes may still be loading."""
        return self._tensor(self._by_name[name])

    def span(self, name: str) -> tuple[int, int]:
        """Return first byte and end of a tensor in the segment."""
        found = self._by_name[name]
        return found.offset, found.offset + found.nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the memory of `tensor` is in the segment."""
        return self._start <= tensor.data_ptr() < self._start + len(self._map)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Offset of `tensor` in the segment; None if it is elsewhere."""
        return tensor.data_ptr() - self._start if tensor.device.type == "cpu" and self.holds(tensor) else None

    def _tensor(self, t: SegmentTensor) -> torch.Tensor:
        dtype, shape = _DTYPES.get(t.dtype), packed_shape(t.dtype, t.shape)
        if dtype is None or shape is None:
            raise CheckpointInvalid(f"Tensor {t.name} of shape {list(t.shape)} has the type {t.dtype}, which torch does not have")
        count = math.prod(shape)
        if count * dtype.itemsize != t.nbytes or t.offset < 0 or t.offset + t.nbytes > len(self._map):
            raise CheckpointInvalid(
                f"Tensor {t.name} of shape {list(t.shape)} and type {t.dtype} does not fit its {t.nbytes} bytes"
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=t.offset).view(shape)
