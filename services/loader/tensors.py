"""Checkpoints as torch tensors in this process, for any program: no NATS, no mesh.

from services.loader.tensors import load_tensors
weights = load_tensors("/models/llama")
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from services.loader.adapters.reader import DEFAULTS, ReadOptions
from services.loader.format.checkpoint import Checkpoint
from services.loader.format.safetensors import TensorEntry
from services.loader.load import load_private
from shared.errors import CheckpointInvalid

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""safetensors' dtypes as torch calls them; those of 4 and 6 bits have no torch type of the same shape."""


def load_tensors(path: Path | str, options: ReadOptions = DEFAULTS) -> dict[str, torch.Tensor]:
    """All tensors of a model directory or a safetensors file, by name, on the CPU.

    They are writable views of one block of memory, which is given back when the last of them is gone; clone what should outlive the others
    alone. A process forked later shares that memory. Raises `CheckpointInvalid` (the message names the file and the remedy) or
    `InsufficientMemory`.
    """
    loaded = load_private(path, options, check=_check_dtypes)
    return {
        entry.name: _tensor(entry, loaded.memory, place.offset)
        for place in loaded.layout.places
        for entry in place.file.header.tensors
    }


def _check_dtypes(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        for entry in file.header.tensors:
            if entry.dtype not in _TORCH_NAMES:
                raise CheckpointInvalid(f"{file.path}: torch has no type for tensor {entry.name!r} of dtype {entry.dtype}")


def _tensor(entry: TensorEntry, memory: mmap.mmap, base: int) -> torch.Tensor:
    # The loader's processes never hold tensors: importing torch with this module would cost each of them a second and 200 MB.
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[entry.dtype])
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    start, count = base + entry.offset, entry.nbytes // dtype.itemsize
    if start % dtype.itemsize:  # old files do not pad their headers, and torch's kernels want aligned elements
        return torch.frombuffer(bytearray(memory[start : start + entry.nbytes]), dtype=dtype).view(entry.shape)
    # The tensor's storage refers to the mapping, which is unmapped with the last of them.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(entry.shape)
