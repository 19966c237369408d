"""A forward pass over several sequences, in the way that the architecture allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from services.engine.generation.kv_cache import PackedBatch, PackedCache, RangeMemory, SequenceKV, Slice, packed
from services.engine.generation.lora_layers import LoraAdapter, LoraSpan, LoraSpans, PatchedLayers, apply_lora

WARM_UP = (1, 1)
"""One short step reads every weight once, which maps its pages and compiles kernels.

More tokens would only add delay.
"""


class RunnerLost(Exception):
    """The runner cannot compute any more: the engine ends with this error."""


class DeviceLost(RunnerLost):
    """The GPU of this process does not compute any more."""


def check_device(cause: Exception, device: torch.device) -> None:
    """Ask the GPU, after `cause`, whether it still computes.

    After an illegal access, an ECC error or a failed assertion of a kernel, each later CUDA call on
    that GPU fails, so that an engine that continued would answer all requests with errors.

    Args:
        cause: The error of a step.
        device: Computed the step. The GPU that is current in this thread may be another one.

    Raises:
        DeviceLost: It does not.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as e:
        raise DeviceLost(f"The GPU does not compute any more: {str(e)[:300]}") from cause


@dataclass(frozen=True)
class Row:
    """New tokens of one sequence.

    Args:
        state: The runner's state of the sequence, which has its first `start` tokens.
        start: Number of tokens already computed.
        tokens: The new tokens.
        adapter: LoRA adapter; None: the base model only.
    """

    state: Any
    start: int
    tokens: Sequence[int]
    adapter: LoraAdapter | None = None


class Runner(Protocol):
    """Runs forward passes."""

    @property
    def rewinds(self) -> bool:
        """True if a state may be reused from an earlier token on."""
        ...

    def new_state(self) -> Any: ...

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return float32 logits after each row's last token: [rows, vocabulary]."""
        ...

    def forget(self, adapter: LoraAdapter) -> None:
        """Drop an adapter that no later row will use."""
        ...


class PackedRunner:
    """One pass for all sequences.

    For models that take attention from transformers' interface and positions from `position_ids`.
    """

    rewinds = True

    def __init__(self, model: PreTrainedModel, device: torch.device, context: int = 0) -> None:
        """Compute with `model` on `device`.

        Args:
            context: Most tokens of a sequence: their addresses in the KV cache are reserved.
        """
        self._model = model
        self._device = device
        self._context = context
        self.kv_memory: RangeMemory | None = None
        """Memory of further states; None: torch allocates it."""
        self._patched = PatchedLayers(model)

    @property
    def device(self) -> torch.device:
        return self._device

    def new_state(self) -> SequenceKV:
        return SequenceKV(self._context, self.kv_memory)

    def warm_up(self) -> SequenceKV:
        """Compute a few tokens, and return their state."""
        state = self.new_state()
        self.forward([Row(state, 0, WARM_UP)])
        return state

    def forget(self, adapter: LoraAdapter) -> None:
        self._patched.forget(adapter)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        adapters = {row.adapter: None for row in rows if row.adapter is not None}
        if not adapters:
            return self._pass(rows, None)
        self._patched.patch(set(adapters))
        # Rows of one adapter are adjacent, those without an adapter first.
        rank = {adapter: i for i, adapter in enumerate((None, *adapters))}
        order = sorted(range(len(rows)), key=lambda i: rank[rows[i].adapter])
        logits = self._pass([rows[i] for i in order], _lora_spans([rows[i] for i in order]))
        return logits[torch.tensor(order).argsort().to(logits.device)]

    def _pass(self, rows: Sequence[Row], spans: LoraSpans | None) -> torch.Tensor:
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for row in rows:
            ids += row.tokens
            positions += range(row.start, row.start + len(row.tokens))
            last.append(len(ids) - 1)
        batch = PackedBatch([Slice(row.state, row.start, len(row.tokens)) for row in rows])
        with torch.inference_mode(), packed(batch), apply_lora(spans):
            output = self._model(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                past_key_values=PackedCache(),
                use_cache=True,
                logits_to_keep=torch.tensor(last, device=self._device),
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def _lora_spans(rows: Sequence[Row]) -> LoraSpans:
    """Spans of adapters in rows that are sorted by adapter."""
    parts: list[LoraSpan] = []
    at = 0
    for i, row in enumerate(rows):
        end = at + len(row.tokens)
        if row.adapter is not None:
            if parts and parts[-1].adapter is row.adapter:
                parts[-1] = replace(parts[-1], last=end, last_row=i + 1)
            else:
                parts.append(LoraSpan(row.adapter, at, end, i, i + 1))
        at = end
    return LoraSpans(at, parts)


class SequentialRunner:
    """One pass per sequence with its own cache.

    For every architecture that `model.generate` can run.
    """

    rewinds = False

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._patched = PatchedLayers(model)

    def forget(self, adapter: LoraAdapter) -> None:
        self._patched.forget(adapter)

    def new_state(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        return torch.stack([self._run_row(row) for row in rows])

    def _run_row(self, row: Row) -> torch.Tensor:
        if row.adapter is not None:
            self._patched.patch({row.adapter})
        with torch.inference_mode(), apply_lora(_lora_spans([row]) if row.adapter is not None else None):
            output = self._model(
                input_ids=torch.tensor([list(row.tokens)], device=self._device),
                attention_mask=torch.ones((1, row.start + len(row.tokens)), dtype=torch.long, device=self._device),
                past_key_values=row.state,
                use_cache=True,
            )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits
