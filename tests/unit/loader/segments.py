"""Reading segments back, as an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.contracts.loader import WeightsAttached
from shared.contracts.segment import HEADER_BYTES, SegmentHeader, SegmentIndex
from shared.mapping import map_extents

SHM = Path("/dev/shm")
_NUMPY = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8}


def read_segment(where: str | WeightsAttached) -> dict[str, npt.NDArray[Any]]:
    """Read a segment from its own file, or from its extents of the pool."""
    name, extents = (where, ()) if isinstance(where, str) else (where.segment, where.extents)
    mapped = map_extents(SHM / name, extents)
    data = bytes(mapped)
    mapped.close()
    header = SegmentHeader.model_validate_json(data[:HEADER_BYTES].rstrip(b"\0"))
    assert header.total_bytes == len(data)
    index = SegmentIndex.model_validate_json(data[header.index_offset : header.index_offset + header.index_bytes])
    return {
        t.name: np.frombuffer(
            data, _NUMPY[t.dtype], count=-1 if t.nbytes == 0 else t.nbytes // np.dtype(_NUMPY[t.dtype]).itemsize, offset=t.offset
        ).reshape(t.shape)
        if t.nbytes
        else np.zeros(t.shape, _NUMPY[t.dtype])
        for t in index.tensors
    }


def assert_same(where: str | WeightsAttached, expected: dict[str, npt.NDArray[Any]]) -> None:
    found = read_segment(where)
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert np.array_equal(found[tensor], value)
        assert found[tensor].dtype == value.dtype
