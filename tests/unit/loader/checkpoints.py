"""Small checkpoints in Hugging Face layout, written without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Tensors = Mapping[str, npt.NDArray[Any]]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tensors(megabytes: float = 0.1, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Return tensors of several shapes and dtypes, about `megabytes` in all."""
    random = np.random.default_rng(seed)
    rows = max(1, int(megabytes * 1e6 / 4 / 3 / 256))
    found: dict[str, npt.NDArray[Any]] = {f"layers.{i}.weight": random.random((rows, 256), dtype=np.float32) for i in range(3)}
    found["norm.weight"] = random.standard_normal(17, dtype=np.float32).astype(np.float16)
    found["scalar"] = np.array(3, dtype=np.int64)
    found["empty"] = np.zeros((0, 4), dtype=np.float32)
    return found


def write_small_files(directory: Path, config: Mapping[str, Any] = CONFIG) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def write_checkpoint(
    directory: Path, weights: Tensors | None = None, *, shards: int = 1, config: Mapping[str, Any] = CONFIG
) -> dict[str, npt.NDArray[Any]]:
    """Write a model directory; return its tensors."""
    weights = dict(tensors() if weights is None else weights)
    write_small_files(directory, config)
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return weights
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(weights)}
    for name in names:
        save_file({t: weights[t] for t, n in weight_map.items() if n == name}, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weights


def write_sparse_checkpoint(directory: Path, nbytes: int) -> None:
    """Write a model whose one tensor is a hole of `nbytes` bytes, free of disk space."""
    write_small_files(directory)
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    header += b" " * (-len(header) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
