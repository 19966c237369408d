"""Template keys: models with equal keys can replace each other in a running engine.

They differ only in weights, tokenizer, chat template, generation defaults and the served name.
Pure.
"""

from __future__ import annotations

import hashlib
import json

from shared.contracts.models import ModelCard, ModelSpec
from shared.sizing import need_of

_OF_THE_ENGINE = (
    "dtype",
    "max_concurrency",
    "engine_args",
    "env",
    "network",
    "stop_signal",
    "health",
    "memory",
)
"""Options of a model that are fixed when its engine starts. All must be equal."""
_PREVENTS = frozenset(
    {
        "api_server_count",
        "data_parallel_size",
        "enable_lora",
        "generation_config",
        "hf_config_path",
        "lora_modules",
        "middleware",
        "model_loader_extra_config",
        "pipeline_parallel_size",
        "served_model_name",
        "speculative_config",
        "tokenizer",
        "worker_extension_cls",
    }
)
"""engine_args that tie vLLM to one model, or keep parts of a model where a change does not replace
them.
"""
_DIGEST_BYTES = 16


def template_key(card: ModelCard) -> str:
    """Return a digest of everything that a running engine depends on except the model's content.

    The version of the engine is not part of the digest, because only a running process changes its
    model.

    Returns:
        The digest; empty if an engine of the model cannot change its model.
    """
    spec, info = card.spec, card.info
    if not info.shape or not can_change_model(spec) or "://" in info.source:
        return ""
    options = spec.model_dump(mode="json", include=set(_OF_THE_ENGINE))
    need = need_of(card)
    text = json.dumps(
        [spec.engine, info.shape, info.task, card.context_length, need.kv, need.total, options],
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def can_change_model(spec: ModelSpec) -> bool:
    """Return whether an engine with these options can change its model.

    The engine must be vLLM as a process, get its weights from Thaw's loader, and have no option
    that ties it to one model.
    """
    if spec.engine != "vllm" or spec.engine_args.get("load_format") != "thaw":
        return False
    if spec.command or spec.container is not None or spec.trust_remote_code or spec.base is not None or spec.stages > 1:
        return False
    return not _PREVENTS & spec.engine_args.keys()
