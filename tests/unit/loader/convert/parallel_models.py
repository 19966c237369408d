"""Random models as transformers saves them, which can be split for several devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "attention_bias": True,
    "max_position_embeddings": 64,
}


def write_model(directory: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write a random model as transformers saves it; return its tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))
    weights: dict[str, torch.Tensor] = load_file(directory / "model.safetensors")
    return weights
