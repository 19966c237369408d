"""One forward pass over several sequences, in the way the architecture allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from services.engine.kv import PackedBatch, PackedCache, SequenceKV, Slice, packed


@dataclass(frozen=True)
class Row:
    """New tokens of one sequence, whose first `start` tokens `state` (made by the runner) knows already."""

    state: Any
    start: int
    tokens: Sequence[int]


class Runner(Protocol):
    """`forward` gives each row's logits (float32) after its last token: [rows, vocabulary]."""

    def new_state(self) -> Any: ...
    def forward(self, rows: Sequence[Row]) -> torch.Tensor: ...


class PackedRunner:
    """All sequences in one pass: for models that take their attention from transformers' interface and positions from `position_ids`."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device

    def new_state(self) -> SequenceKV:
        return SequenceKV()

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for row in rows:
            ids += row.tokens
            positions += range(row.start, row.start + len(row.tokens))
            last.append(len(ids) - 1)
        batch = PackedBatch([Slice(row.state, row.start, len(row.tokens)) for row in rows])
        with torch.inference_mode(), packed(batch):
            output = self._model(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                past_key_values=PackedCache(),
                use_cache=True,
                logits_to_keep=torch.tensor(last, device=self._device),
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


class SequentialRunner:
    """One pass for each sequence with its own cache: for every architecture that `model.generate` can run."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device

    def new_state(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.stack([self._one(row) for row in rows])

    def _one(self, row: Row) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(row.tokens)], device=self._device),
                attention_mask=torch.ones((1, row.start + len(row.tokens)), dtype=torch.long, device=self._device),
                past_key_values=row.state,
                use_cache=True,
            )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits
