"""Weights in every input layout of `thaw convert`, and their converted form."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.dtypes import TORCH_NAMES
from tests.unit.loader.checkpoints import write_small_files
from weights.formats.checkpoint import open_checkpoint

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor of a converted checkpoint.

    The code under test reads only its index.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: bytes


def stored(directory: Path, rank: int = 0, ranks: int = 1) -> dict[str, Stored]:
    found = {}
    for file in open_checkpoint(directory, rank, ranks).files:
        data = file.path.read_bytes()
        for t in file.header.tensors:
            found[t.name] = Stored(t.dtype, t.shape, t.offset, data[t.offset : t.offset + t.nbytes])
    return found


def raw(tensor: torch.Tensor) -> bytes:
    """Return row-major bytes, read from memory, which works for every dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize) if plain.numel() else b""


def named(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as in the index."""
    name = next(ours for ours, theirs in TORCH_NAMES.items() if getattr(torch, theirs) == tensor.dtype)
    shape = tuple(tensor.shape)
    return name, (*shape[:-1], 2 * shape[-1]) if name == "F4" else shape


def same(weights: Weights, found: Mapping[str, Stored]) -> bool:
    """Return whether every tensor is there, byte for byte."""
    return weights.keys() == found.keys() and all(
        (found[name].dtype, found[name].shape, found[name].data) == (*named(tensor), raw(tensor))
        for name, tensor in weights.items()
    )


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a small model.

    Two of its tensors are tied, one is transposed in memory, one has no elements, one no
    dimensions.
    """
    random = torch.Generator().manual_seed(seed)
    embedding = torch.randn(40, 16, generator=random).to(torch.bfloat16)
    return {
        "embed.weight": embedding,
        "layers.0.weight": torch.randn(300, 128, generator=random),
        "layers.0.transposed": torch.randn(24, 8, generator=random).t(),
        "scale": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros((0, 4)),
        "head.weight": embedding,
    }


def write_torch(directory: Path, weights: Weights, *, legacy: bool = False) -> Path:
    """Write a model directory with one pytorch_model.bin."""
    write_small_files(directory)
    torch.save(dict(weights), directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    return directory


def write_torch_shards(directory: Path, weights: Weights, shards: int = 2) -> Path:
    """Write a model directory with pytorch_model-….bin files and their index."""
    write_small_files(directory)
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(weights)}
    for name in names:
        torch.save({t: weights[t] for t, n in weight_map.items() if n == name}, directory / name)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
