"""A model whose parameters are the bytes of a segment.

It is built on the meta device, bound without a copy, and checked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from services.engine import remote_code
from services.engine.domain.error_text import first_paragraph
from services.engine.generation.attention import PACKED
from services.engine.model.segment import Segment
from shared.contracts.models import ModelCard
from shared.errors import CheckpointInvalid, UnsupportedArchitecture

log = logging.getLogger(__name__)

PACKABLE = frozenset(
    {
        "cohere",
        "gemma",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Model types whose packed steps are tested against `model.generate`
(tests/integration/engine/test_families.py).

The others run one sequence at a time.
"""
EMBEDDING = frozenset({"bert", "distilbert", "llama", "mistral", "modernbert", "mpnet", "qwen2", "qwen3", "roberta", "xlm-roberta"})
"""Model types whose embeddings are tested to read no weight before they have waited for it
(tests/integration/engine/test_layer_gates.py).
"""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rope types whose angles depend on the longest sequence of a pass, so sequences must not share
one.
"""
_SHOWN = 5


def read_config(directory: Path, card: ModelCard) -> PreTrainedConfig:
    """Read config.json. Raises `CheckpointInvalid` or `UnsupportedArchitecture`."""
    try:
        trusted = card.spec.trust_remote_code
        with remote_code.guard_remote_code(trusted):
            return AutoConfig.from_pretrained(str(directory), trust_remote_code=trusted, local_files_only=True)
    except (ValueError, KeyError) as e:
        raise UnsupportedArchitecture(f"transformers cannot read this model's config.json: {first_paragraph(e)}") from e
    except (OSError, TypeError) as e:
        raise CheckpointInvalid(f"config.json cannot be read: {first_paragraph(e)}") from e


def read_generation_defaults(directory: Path) -> dict[str, Any]:
    """The explicit values of generation_config.json; {} without the file.

    transformers' own defaults are not included.
    """
    try:
        value = json.loads((directory / "generation_config.json").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise CheckpointInvalid(f"generation_config.json cannot be read: {e}") from e
    return value if isinstance(value, dict) else {}


def eos_tokens(config: PreTrainedConfig, defaults: Mapping[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    """All ids that end a response.

    The sources are the generation configuration, or else the model configuration, and the
    tokenizer.
    """
    found = defaults.get("eos_token_id", getattr(config.get_text_config(), "eos_token_id", None))
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in (*ids, tokenizer_eos) if isinstance(i, int))


def model_class(config: PreTrainedConfig, card: ModelCard, directory: Path) -> type[PreTrainedModel]:
    auto, name = (AutoModelForCausalLM, "AutoModelForCausalLM") if card.info.task == "generate" else (AutoModel, "AutoModel")
    remote = (getattr(config, "auto_map", None) or {}).get(name)
    if remote is not None and card.spec.trust_remote_code:
        with remote_code.guard_remote_code(True):
            found: type[PreTrainedModel] = get_class_from_dynamic_module(remote, str(directory))
        return found
    try:
        known = auto._model_mapping[type(config)]
    except KeyError as e:
        raise UnsupportedArchitecture(f"transformers has no {name} for models of type {config.model_type!r}") from e
    kind: type[PreTrainedModel] = known[0] if isinstance(known, tuple | list) else known
    return kind


def is_packable(config: PreTrainedConfig, kind: type[PreTrainedModel]) -> bool:
    """True if sequences of this model may share a forward pass."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    return (
        config.model_type in PACKABLE
        and bool(getattr(kind, "_supports_attention_backend", False))
        and not kinds & _LENGTH_DEPENDENT_ROPE
        and not getattr(config, "reorder_and_upcast_attn", False)
    )


def torch_dtype(card: ModelCard) -> torch.dtype:
    name = card.info.dtype if card.spec.dtype == "auto" else card.spec.dtype
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise UnsupportedArchitecture(f"Weights of type {name} are not supported; set dtype to float32, bfloat16 or float16")
    return found


def bind(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    is_packed: bool = False,
) -> PreTrainedModel:
    """Build the model with its parameters bound to `tensors`, by name.

    transformers' own loading code computes buffers, ties weights, and handles renamed keys and
    prefixes. It reads no data unless a parameter has to be converted.

    Args:
        kind: The model's class.
        config: The model's configuration.
        tensors: The checkpoint.
        dtype: Type of the parameters.
        is_packed: Sequences share a forward pass (`is_packable`).

    Raises:
        CheckpointInvalid: A tensor is missing or has a wrong shape.
        UnsupportedArchitecture: transformers cannot build the model.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    arguments: dict[str, Any] = {"attn_implementation": PACKED} if is_packed else {}
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitecture("Quantised checkpoints are not supported by the builtin engine")
    try:
        model, loading_info = kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **arguments,
        )
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as e:
        raise UnsupportedArchitecture(f"transformers cannot build {kind.__name__}: {type(e).__name__}: {e}") from e
    except RuntimeError as e:
        raise CheckpointInvalid(f"The weights do not fit {kind.__name__}: {e}") from e
    _check(kind, loading_info)
    bound: PreTrainedModel = model.eval().requires_grad_(False)
    return bound


def _check(kind: type[PreTrainedModel], loading_info: Mapping[str, Any]) -> None:
    wrong = sorted(loading_info["mismatched_keys"], key=str)
    if wrong:
        shown = "; ".join(f"{name} is {list(found)} and must be {list(wanted)}" for name, found, wanted in wrong[:_SHOWN])
        raise CheckpointInvalid(f"{len(wrong)} tensors have wrong shapes for {kind.__name__}: {shown}")
    missing = sorted(name for name in loading_info["missing_keys"] if "pooler." not in name)
    if missing:
        raise CheckpointInvalid(f"{len(missing)} tensors are missing for {kind.__name__}: {', '.join(missing[:_SHOWN])}")
    if loading_info["unexpected_keys"]:
        log.warning("tensors without a place in the model", extra={"tensors": sorted(loading_info["unexpected_keys"])[:_SHOWN]})


def copied_parameters(model: PreTrainedModel, segment: Segment) -> list[str]:
    """Names of parameters outside the segment: the converted ones."""
    return [name for name, p in model.named_parameters() if p.numel() and not segment.holds(p)]
