"""Tensors as the data of frames."""

from __future__ import annotations

from typing import Any

import torch

from services.engine.domain.frames import ProtocolError
from services.engine.stages.connections import Frame


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, row by row."""
    values: Any = tensor.detach().to("cpu").contiguous().view(torch.uint8).reshape(-1).numpy()
    return memoryview(values)


def from_bytes(frame: Frame, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a frame's data as a tensor of shape [rows, width].

    Raises:
        ProtocolError: It has another number of bytes.
    """
    expected = rows * width * dtype.itemsize
    if len(frame.data) != expected:
        raise ProtocolError(f"A frame has {len(frame.data)} bytes of data, and {rows} rows of {width} values have {expected}")
    return torch.frombuffer(frame.data, dtype=dtype).view(rows, width)
