"""Model families of the built-in engine: small configurations, saved with random weights."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

VOCABULARY = 1024
_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NO_GROUPS = {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}
_ENDS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}

CONFIGS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**_SMALL),
    "llama-tied": tf.LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama-scaled-rope": tf.LlamaConfig(**_SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    "llama-dynamic-rope": tf.LlamaConfig(
        **{**_SMALL, "max_position_embeddings": 128},
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "qwen2": tf.Qwen2Config(**_SMALL),
    "qwen2-window": tf.Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": tf.Qwen3Config(**_SMALL, head_dim=16),
    "qwen3-moe": tf.Qwen3MoeConfig(**_SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mistral-window": tf.MistralConfig(**_SMALL, head_dim=16, sliding_window=12),
    "mixtral": tf.MixtralConfig(**_SMALL),
    "gemma": tf.GemmaConfig(**_SMALL, head_dim=16),
    "gemma2": tf.Gemma2Config(**_SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=12),
    "gemma3": tf.Gemma3TextConfig(**_SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=12),
    "gpt-neox": tf.GPTNeoXConfig(**_NO_GROUPS),
    "gpt2": tf.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.3, **_ENDS),
    "opt": tf.OPTConfig(
        hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64, init_std=0.3, **_ENDS
    ),
    "phi": tf.PhiConfig(**_SMALL),
    "phi3": tf.Phi3Config(**_SMALL),
    "granite": tf.GraniteConfig(**_SMALL),
    "olmo2": tf.Olmo2Config(**_SMALL),
    "stablelm": tf.StableLmConfig(**_SMALL),
    "starcoder2": tf.Starcoder2Config(**_SMALL),
    "cohere": tf.CohereConfig(**_SMALL),
    "smollm3": tf.SmolLM3Config(**_SMALL),
    "falcon": tf.FalconConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.3, **_ENDS),
    "bloom": tf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, initializer_range=0.3, **_ENDS),
}
CONVERTED = {"qwen3-moe", "mixtral"}
"""transformers fuses their experts' weights, so these are copies."""


def save(name: str, directory: Path, tokenizer: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), dtype=dtype)
    model.generation_config = tf.GenerationConfig()
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / file, directory / file)
    return directory


def running(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test that runs the builtin engine with these configurations."""
    return [pytest.param(name, marks=pytest.mark.runs("builtin", CONFIGS[name].model_type)) for name in names]
