"""Checkpoints as torch tensors in this process, for any program: no NATS, no mesh.

from weights.tensors import load_tensors
weights = load_tensors("/models/llama")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import CheckpointInvalid
from weights.binding import bind, is_bindable
from weights.formats.checkpoint import Checkpoint
from weights.load import load_private
from weights.pool.memory import PoolMemory
from weights.transfer.reader import DEFAULTS, ReadOptions

if TYPE_CHECKING:
    import torch


def load_tensors(
    path: Path | str, options: ReadOptions = DEFAULTS, *, rank: int = 0, ranks: int = 1, pool: PoolMemory | None = None
) -> dict[str, torch.Tensor]:
    """Load all tensors of a model, by name, on the CPU.

    The model is a directory, a safetensors file or a URL. The tensors are writable views of one
    block of memory, which is freed with the last of them; clone a tensor that must outlive the
    others alone. A process forked later shares that memory.

    Args:
        rank: The part to load of a model that `thaw convert --tensor-parallel` has divided for
            `ranks`.
        pool: Prepared memory (`weights.load.ready_pool`), used up by this load.

    Raises:
        CheckpointInvalid: A file is missing or invalid; the message names the file and the remedy.
        InsufficientMemory: The memory does not suffice.
    """
    loaded = load_private(path, options, rank=rank, ranks=ranks, check=check_dtypes, pool=pool)
    memory = memoryview(loaded.memory)  # unmapped with the last tensor
    found = {}
    for place in loaded.layout.places:
        for entry in place.file.header.tensors:
            start = place.offset + entry.offset
            found[entry.name] = bind(entry.name, entry.dtype, entry.shape, memory[start : start + entry.nbytes], start)
    return found


def check_dtypes(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointInvalid` for a tensor that torch has no type for."""
    for file in checkpoint.files:
        for entry in file.header.tensors:
            if not is_bindable(entry.dtype, entry.shape):
                raise CheckpointInvalid(
                    f"{file.path}: torch has no type for tensor {entry.name!r} of dtype {entry.dtype} and shape {list(entry.shape)}"
                )
