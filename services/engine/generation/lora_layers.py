"""LoRA in a forward pass that rows of several adapters share: each linear layer is computed once for all rows, then every adapter's
low-rank product is added to its own rows.

The product is computed in the type that the adapter was saved in, as PEFT does it, and rounded once when it is added. Adapters are tensors
beside the model: the base's weights are never changed.
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
class Pair:
    """A module's low-rank product: `b @ a * scale`. a: [rank, inputs], b: [outputs, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Adapter:
    """One adapter's pairs by the names of the modules they belong to."""

    def __init__(self, name: str, pairs: Mapping[str, Pair]) -> None:
        self.name = name
        self.pairs = pairs


@dataclass(frozen=True)
class Share:
    """`adapter`'s rows: tokens `first` to `last` of the pass, and logits `first_row` to `last_row`."""

    adapter: Adapter
    first: int
    last: int
    first_row: int
    last_row: int


@dataclass(frozen=True)
class Shares:
    """Who has which of a pass's `tokens`."""

    tokens: int
    parts: Sequence[Share]


_current: ContextVar[Shares | None] = ContextVar("lora_shares", default=None)


@contextmanager
def shared_by(shares: Shares | None) -> Iterator[None]:
    """Forward passes inside belong to `shares`; None: to the base alone."""
    token = _current.set(shares)
    try:
        yield
    finally:
        _current.reset(token)


def parse(card: ModelCard, tensors: Mapping[str, torch.Tensor], model: PreTrainedModel, device: torch.device) -> Adapter:
    """The adapter that `tensors` (named as PEFT names them) are, checked against the model. No tensor is copied on the CPU.

    Raises `CheckpointInvalid` for what does not fit.
    """
    info = card.info.adapter
    if info is None:
        raise CheckpointInvalid(f"{card.name} is no adapter")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointInvalid(f"{card.name}: tensor {name!r} is none of a linear layer's LoRA pair")
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
        pairs[module] = Pair(a.to(device), b.to(device), info.scale_of(module))
    return Adapter(card.name, pairs)


def _size(module: torch.nn.Linear | Conv1D) -> tuple[int, int]:
    """Outputs and inputs; GPT-2's kind of layer keeps its weight the other way round."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


class Patched:
    """Has the model's linear layers add what the current pass's adapters say. A layer is patched while any adapter that it knows of needs
    it; the others cost nothing. Used by the computing thread alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._users: Counter[str] = Counter()
        self._known: set[Adapter] = set()

    def need(self, adapters: set[Adapter]) -> None:
        """Patch what `adapters` add to."""
        for adapter in adapters - self._known:
            self._known.add(adapter)
            for name in adapter.pairs:
                self._users[name] += 1
                if self._users[name] == 1:
                    module = self._model.get_submodule(name)
                    module.__dict__["forward"] = _adding(name, module.forward)

    def forget(self, adapter: Adapter) -> None:
        """Nothing computes with `adapter` any more."""
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
        shares = _current.get()
        if shares is not None:
            _add(name, shares, x, output)
        return output

    return adding


def _add(name: str, shares: Shares, x: torch.Tensor, output: torch.Tensor) -> None:
    """In place. The token axis is the last but one; the head of the model sees the rows' last tokens only."""
    whole = x.shape[-2] == shares.tokens
    inputs = {x.dtype: x}
    for part in shares.parts:
        pair = part.adapter.pairs.get(name)
        if pair is None:
            continue
        first, last = (part.first, part.last) if whole else (part.first_row, part.last_row)
        if pair.a.dtype not in inputs:
            inputs[pair.a.dtype] = x.to(pair.a.dtype)
        low = linear(inputs[pair.a.dtype].narrow(-2, first, last - first), pair.a)
        output.narrow(-2, first, last - first).add_(linear(low, pair.b), alpha=pair.scale)
