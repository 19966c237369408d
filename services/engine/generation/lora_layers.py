"""LoRA in a forward pass whose rows use several adapters.

Each linear layer is computed once for all rows; then every adapter's low-rank product is added to
its own rows. The product is computed in the type that the adapter was saved in, as PEFT does, and
rounded once when added. The base model's weights never change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shared.contracts.models import ModelCard
from shared.errors import CheckpointInvalid

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_SHOWN = 3


@dataclass(frozen=True)
class LowRankPair:
    """The low-rank product of a module: `b @ a * scale`.

    Shapes: a [rank, inputs], b [outputs, rank].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class LoraAdapter:
    """The pairs of one adapter, by module name."""

    def __init__(self, name: str, pairs: Mapping[str, LowRankPair]) -> None:
        self.name = name
        self.pairs = pairs


@dataclass(frozen=True)
class LoraSpan:
    """The rows of `adapter` in a pass.

    Tokens `first` to `last`, logits `first_row` to `last_row`.
    """

    adapter: LoraAdapter
    first: int
    last: int
    first_row: int
    last_row: int


@dataclass(frozen=True)
class LoraSpans:
    """The adapter of each of the pass's `tokens`."""

    tokens: int
    parts: Sequence[LoraSpan]


_current: ContextVar[LoraSpans | None] = ContextVar("lora_shares", default=None)


@contextmanager
def apply_lora(spans: LoraSpans | None) -> Iterator[None]:
    """Apply `spans` in forward passes inside this context. None: the base model only."""
    token = _current.set(spans)
    try:
        yield
    finally:
        _current.reset(token)


def parse(card: ModelCard, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, device: torch.device) -> LoraAdapter:
    """Build an adapter from tensors with PEFT's names, checked against the model.

    On the CPU no tensor is copied.

    Raises:
        CheckpointInvalid: A tensor does not fit the model.
    """
    info = card.info.adapter
    if info is None:
        raise CheckpointInvalid(f"{card.name} is not a LoRA adapter")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointInvalid(f"{card.name}: tensor {name!r} does not belong to a LoRA pair of a linear layer")
        halves.setdefault(found["module"], {})[found["part"]] = tensor
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    pairs = {}
    for module, half in halves.items():
        target = linears.get(module)
        if target is None:
            known = sorted({n.rsplit(".", 1)[-1] for n in linears})
            raise CheckpointInvalid(
                f"{card.name} adds to {module}, which is no linear layer of its base (it has {', '.join(known)})"
            )
        outputs, inputs = _size(target)
        rank = info.rank_of(module)
        a, b = half.get("A"), half.get("B")
        if a is None or b is None or list(a.shape) != [rank, inputs] or list(b.shape) != [outputs, rank]:
            raise CheckpointInvalid(
                f"{card.name} does not fit {module} of its base: lora_A must be [{rank}, {inputs}] and lora_B [{outputs}, {rank}], and they "
                f"are {list(a.shape) if a is not None else 'missing'} and {list(b.shape) if b is not None else 'missing'}"
            )
        if a.dtype != b.dtype:  # the steps that compute it would fail, with the requests of others
            raise CheckpointInvalid(
                f"{card.name} has lora_A of {module} as {a.dtype} and lora_B as {b.dtype}. Save the adapter in one type"
            )
        pairs[module] = LowRankPair(a.to(device), b.to(device), info.scale_of(module))
    return LoraAdapter(card.name, pairs)


def _size(module: torch.nn.Linear | Conv1D) -> tuple[int, int]:
    """Outputs and inputs of a layer. GPT-2's `Conv1D` stores its weight transposed."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


class PatchedLayers:
    """Patches linear layers to add the low-rank products of the current pass.

    A layer is patched while any known adapter needs it; the other layers cost nothing. Used by the
    computing thread only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._users: Counter[str] = Counter()
        self._known: set[LoraAdapter] = set()

    def patch(self, adapters: set[LoraAdapter]) -> None:
        """Patch the layers of `adapters`."""
        for adapter in adapters - self._known:
            self._known.add(adapter)
            for name in adapter.pairs:
                self._users[name] += 1
                if self._users[name] == 1:
                    module = self._model.get_submodule(name)
                    module.__dict__["forward"] = _adding(name, module.forward)

    def forget(self, adapter: LoraAdapter) -> None:
        """Unpatch the layers that only `adapter` needed."""
        if adapter not in self._known:
            return
        self._known.discard(adapter)
        for name in adapter.pairs:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                del self._model.get_submodule(name).__dict__["forward"]


def _adding(name: str, forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def adding(x: torch.Tensor) -> torch.Tensor:
        output = forward(x)
        spans = _current.get()
        if spans is not None:
            _add(name, spans, x, output)
        return output

    return adding


def _add(name: str, spans: LoraSpans, x: torch.Tensor, output: torch.Tensor) -> None:
    """Add the low-rank products to `output` in place.

    The token axis is the last but one. The model's head sees only the last token of each row.
    """
    whole = x.shape[-2] == spans.tokens
    inputs = {x.dtype: x}
    for part in spans.parts:
        pair = part.adapter.pairs.get(name)
        if pair is None:
            continue
        first, last = (part.first, part.last) if whole else (part.first_row, part.last_row)
        if pair.a.dtype not in inputs:
            inputs[pair.a.dtype] = x.to(pair.a.dtype)
        low = linear(inputs[pair.a.dtype].narrow(-2, first, last - first), pair.a)
        output.narrow(-2, first, last - first).add_(linear(low, pair.b), alpha=pair.scale)
