"""The small files of a checkpoint: tokenizer, defaults of generation, pooling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.generation.embedding import Pooling, read_pooling
from services.engine.model import checkpoint
from services.engine.model.architectures import ModelCache
from services.engine.tokenization import Tokenization
from shared.contracts.engine import EngineStart


@dataclass(frozen=True)
class ModelFiles:
    """The contents of the model's small files."""

    tokenization: Tokenization
    generation_defaults: Mapping[str, Any]
    pooling: Pooling


def read_files(directory: Path, start: EngineStart, cache: ModelCache) -> ModelFiles:
    return ModelFiles(
        cache.tokenization(directory, trust_remote_code=start.card.spec.trust_remote_code),
        checkpoint.read_generation_defaults(directory),
        read_pooling(directory, causal=start.card.info.task == "generate"),
    )
