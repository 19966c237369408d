"""Embedding vectors: pooled hidden states of the last layer.

The model's sentence-transformers files define the pooling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from services.engine.generation.kv_cache import PackedBatch, PackedCache, SequenceKV, Slice, packed
from shared.errors import CheckpointInvalid, InvalidRequest, UnsupportedArchitecture

BATCH = 16
"""Inputs of an encoder per forward pass."""

Pool = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps hidden states [n, tokens, width] and a mask [n, tokens] of ones followed by zeros to vectors
[n, width].
"""


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def _mean_sqrt(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).sqrt()


def _pool_max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask[..., None] == 0, float("-inf")).amax(1)


def _cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[:, 0]


def _pool_last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), mask.sum(1) - 1]


_POOLS: dict[str, Pool] = {
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "max": _pool_max,
    "cls": _cls,
    "lasttoken": _pool_last,
}
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class Pooling:
    """The way to pool hidden states."""

    mode: str
    normalize: bool


def read_pooling(directory: Path, causal: bool) -> Pooling:
    """Read modules.json and the pooling module's config.json.

    Without them decoders use the last token and encoders the mean, both normalised.

    Raises:
        CheckpointInvalid: A file cannot be read.
        UnsupportedArchitecture: A module or pooling mode is not supported.
    """
    try:
        modules = json.loads((directory / "modules.json").read_text())
    except FileNotFoundError:
        return Pooling("lasttoken" if causal else "mean", normalize=True)
    except (OSError, ValueError) as e:
        raise CheckpointInvalid(f"modules.json cannot be read: {e}") from e
    kinds = {str(module.get("type", "")).rsplit(".", 1)[-1]: str(module.get("path", "")) for module in modules}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedArchitecture(f"sentence-transformers modules {', '.join(sorted(unknown))} are not supported")
    return Pooling(_mode(directory / kinds.get("Pooling", "1_Pooling") / "config.json"), "Normalize" in kinds)


def _mode(path: Path) -> str:
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise CheckpointInvalid(f"{path.parent.name}/config.json cannot be read: {e}") from e
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    if len(modes) != 1 or modes[0] not in _POOLS:
        raise UnsupportedArchitecture(f"Pooling by {' + '.join(map(str, modes)) or 'nothing'} is not supported")
    return str(modes[0])


class Embedder:
    """Computes vectors in float32.

    Args:
        causal: The model is a decoder: inputs are computed one at a time without padding.
        is_packed: The model uses packed attention.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, pooling: Pooling, *, causal: bool, is_packed: bool) -> None:
        self._model = model.base_model if causal else model
        self.device = device
        self._pool = _POOLS[pooling.mode]
        self._normalize = pooling.normalize
        self._is_packed = is_packed
        self.batch = 1 if causal else BATCH
        self.dimensions = int(model.config.get_text_config().hidden_size)

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: int | None) -> torch.Tensor:
        """Embed at most `batch` inputs.

        Returns:
            Vectors of shape [inputs, dimensions] on the CPU.

        Raises:
            InvalidRequest: The model has fewer dimensions than requested.
        """
        if dimensions is not None and dimensions > self.dimensions:
            raise InvalidRequest(f"This model's vectors have {self.dimensions} dimensions", param="dimensions")
        longest = max(map(len, inputs))
        ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in inputs], device=self.device)
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in inputs], device=self.device)
        with torch.inference_mode():
            pooled = self._pool(self._compute_hidden(ids, mask).float(), mask)
            if dimensions is not None:
                pooled = pooled[:, :dimensions]
            if self._normalize or dimensions is not None:
                pooled = torch.nn.functional.normalize(pooled, dim=-1)
            return pooled.cpu()

    def _compute_hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            hidden: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        with packed(PackedBatch([Slice(SequenceKV(), 0, ids.shape[1])])):
            output = self._model(input_ids=ids, position_ids=positions, past_key_values=PackedCache(), use_cache=True)
        states: torch.Tensor = output.last_hidden_state
        return states
