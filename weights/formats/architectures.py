"""Read a model's architecture, context and geometry from config.json.

The module does not need transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import CheckpointInvalid, InvalidModel, UnsupportedArchitecture

SUPPORTED = (
    "decoder language models (…ForCausalLM, …LMHeadModel: Llama, Qwen2/3, Mistral, Gemma, GPT-NeoX, GPT-2, OPT and their like) and "
    "encoders for embeddings (BERT, RoBERTa, DistilBERT, MPNet and their like), unquantised"
)
ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)
_POSITIONS_FROM_TWO = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
"""Their positions begin at padding_idx + 1 = 2: two of max_position_embeddings are unused."""
_CONDITIONAL_DECODERS = frozenset({"Gemma3ForConditionalGeneration"})
"""Multimodal models whose text part transformers' AutoModelForCausalLM runs."""

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length", "max_sequence_length")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")

DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"max_position_embeddings": 2048, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_size": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_size": 4096,
        "head_dim": 128,
    },
    "gemma": {
        "max_position_embeddings": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 3072,
        "head_dim": 256,
    },
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "head_dim": 256,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 2304,
        "head_dim": 256,
    },
    "gpt_neox": {"max_position_embeddings": 2048, "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_size": 6144},
    "gpt2": {"n_positions": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768},
    "opt": {"max_position_embeddings": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "bert": {"max_position_embeddings": 512, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "roberta": {"max_position_embeddings": 512, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768},
    "distilbert": {"max_position_embeddings": 512, "n_layers": 6, "n_heads": 12, "dim": 768},
}
"""Defaults of transformers' configuration classes for keys that config.json lacks (files of small
Gemma 3 lack nearly all); tests/contract/test_loader_defaults.py compares them.
"""


@dataclass(frozen=True)
class Architecture:
    """Architecture, context and geometry of a model.

    Attributes:
        kv_elements_per_token: Elements of the keys and values of one token over all layers, as if
            every layer saw the whole context (windows make it less).
    """

    name: str
    model_type: str
    task: Literal["generate", "embed"]
    context_length: int
    kv_elements_per_token: int
    vocab_size: int = 0


def read_architecture(config: Mapping[str, Any], where: str, *, embeds: bool, trust_remote_code: bool) -> Architecture:
    """Return the architecture that `config`, the content of `where`, describes.

    Args:
        embeds: The model has a sentence-transformers pooling.

    Raises:
        UnsupportedArchitecture: The builtin engine cannot run it.
        InvalidModel: It needs code of its own, which is not allowed.
        CheckpointInvalid: The configuration is invalid.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointInvalid(f"{where} does not say its model_type; download it again")
    if "auto_map" in config and not trust_remote_code:
        raise InvalidModel(
            f"{where} wants to run the model's own Python code (auto_map); if you trust its author, register the model "
            "with trust_remote_code: true"
        )
    name = _class_name(config, where)
    task = _task(name, model_type, embeds)
    if task is None:
        raise UnsupportedArchitecture(f"{name} ({where}) is not supported by the builtin engine; supported are {SUPPORTED}")
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise UnsupportedArchitecture(
            f"{where}: {method} quantisation is not supported by the builtin engine; take the unquantised model"
        )
    text = _text_part(config)
    encoder = model_type in ENCODERS and task == "embed"
    kv_elements = 0 if encoder else _kv_elements(text, where)
    vocabulary = _number(text, ("vocab_size",), where) or 0
    return Architecture(name, model_type, task, _context(text, model_type, where), kv_elements, vocabulary)


def _class_name(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedArchitecture(f"{where} names no architecture (`architectures`); supported are {SUPPORTED}")
    return names[0]


def _task(name: str, model_type: str, embeds: bool) -> Literal["generate", "embed"] | None:
    decoder = name.endswith("ForCausalLM") or "LMHead" in name or name in _CONDITIONAL_DECODERS
    encoder = model_type in ENCODERS and name.endswith(("Model", "ForMaskedLM", "ForPreTraining")) and not decoder
    if encoder or (embeds and (decoder or name.endswith("Model"))):
        return "embed"
    return "generate" if decoder else None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _number(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int | None:
    """Return the first of `keys` that `config` or its model type's defaults have.

    The defaults are those of transformers.
    """
    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    for source in (config, defaults):
        for key in keys:
            value = source.get(key)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < 1 << 31:
                raise CheckpointInvalid(f"{where}: {key} is {value!r:.40}, which is not a positive number; download it again")
            return value
    return None


def _require_number(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    value = _number(config, keys, where)
    if value is None:
        raise CheckpointInvalid(f"{where} does not say {keys[0]} (nor {', '.join(keys[1:])}); add it")
    return value


def _context(text: Mapping[str, Any], model_type: str, where: str) -> int:
    length = _require_number(text, _CONTEXT, where)
    return max(1, length - 2) if model_type in _POSITIONS_FROM_TWO else length


def _kv_elements(text: Mapping[str, Any], where: str) -> int:
    heads = _require_number(text, _HEADS, where)
    head_dim = _number(text, ("head_dim",), where) or max(1, _require_number(text, _WIDTH, where) // heads)
    kv_heads = _number(text, _KV_HEADS, where) or (1 if text.get("multi_query") is True else heads)
    return 2 * _require_number(text, _LAYERS, where) * kv_heads * head_dim
