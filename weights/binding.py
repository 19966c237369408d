"""Tensors of a checkpoint as torch views of its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.dtypes import TORCH_NAMES, packed_shape
from shared.errors import CheckpointInvalid

if TYPE_CHECKING:
    import torch


def is_bindable(dtype: str, shape: tuple[int, ...]) -> bool:
    """True if torch has a type for it."""
    return dtype in TORCH_NAMES and packed_shape(dtype, shape) is not None


def bind(name: str, dtype: str, shape: tuple[int, ...], data: memoryview, offset: int) -> torch.Tensor:
    """Make a writable view of `data`, or a copy if its elements would be unaligned.

    A view keeps `data` alive.

    Args:
        offset: Begin of `data`, in bytes from an address that is aligned for every type.

    Raises:
        CheckpointInvalid: torch has no type for it.
    """
    # The loader's processes never hold tensors: importing torch with this module would cost each of
    # them a second and 200 MB.
    import torch

    kept = packed_shape(dtype, shape)
    if dtype not in TORCH_NAMES or kept is None:
        raise CheckpointInvalid(f"torch has no type for tensor {name!r} of dtype {dtype} and shape {list(shape)}")
    kind: torch.dtype = getattr(torch, TORCH_NAMES[dtype])
    if not len(data):
        return torch.empty(kept, dtype=kind)
    if offset % kind.itemsize:  # old files do not pad their headers, and torch's kernels want aligned elements
        return torch.frombuffer(bytearray(data), dtype=kind).view(kept)
    return torch.frombuffer(data, dtype=kind).view(kept)
