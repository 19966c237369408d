"""Tensors and tokens as the data of frames."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as uint32, in the byte order of the host."""
    return array("I", tokens).tobytes()


def tokens_from_bytes(data: bytes | bytearray | memoryview) -> tuple[int, ...]:
    """Return the tokens of a frame's data.

    Raises:
        ProtocolError: It has no whole number of tokens.
    """
    tokens = array("I")
    if len(data) % tokens.itemsize:
        raise ProtocolError(f"A frame has {len(data)} bytes, which are no whole number of tokens")
    tokens.frombytes(data)
    return tuple(tokens)
