"""Model cards of LoRA adapters."""

from __future__ import annotations

from shared.contracts.model_info import AdapterInfo, ModelInfo
from shared.contracts.models import ModelCard, ModelSpec


def card(name: str, nbytes: int = 40, revision: str = "") -> ModelCard:
    info = ModelInfo(
        source="/a",
        revision=revision or name,
        architecture="A",
        model_type="a",
        task="generate",
        weights_bytes=nbytes,
        parameters=1,
        dtype="float32",
        context_length=8,
        kv_bytes_per_token=1,
        adapter=AdapterInfo(rank=1, alpha=1),
    )
    return ModelCard(spec=ModelSpec(name=name, source="/a", base="base"), info=info, created=0)
