"""Copies of a model's modules: what `copy.deepcopy` makes, and independent of the original."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from services.engine.model.module_copy import copy_modules


class Scaled(nn.Module):
    """A layer with a buffer, and attributes that refer to other modules."""

    scale: torch.Tensor

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.sources = [source]
        self.options: dict[str, Any] = {"eps": 1e-5, "nested": {"layers": [source]}}
        self.apply_inner = partial(Scaled.scaled, self)
        self.seen: set[int] = set()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.inner(x) * self.scale
        return scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.apply_inner(x) + self.sources[0](x)
        return added


class Counted(nn.Linear):
    """A layer that says how it is copied."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        made = Counted(self.in_features, self.out_features)
        made.load_state_dict(self.state_dict())
        made.requires_grad_(False)
        made.copies = self.copies + 1
        return made


class Model(nn.Module):
    """A model with tied weights, a module in two places, and one that says how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.scaled = Scaled(self.first)
        self.layers = nn.ModuleList([tied := Scaled(self.first)])
        self.tied = tied
        self.counted = Counted(4, 4)
        tied.inner.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(self.counted(self.layers[0](self.scaled(self.first(x)))))
        return found


def model() -> Model:
    return Model().eval().requires_grad_(False)


def memo_of(tensors: nn.Module) -> dict[int, Any]:
    return {id(buffer): buffer for buffer in tensors.buffers()}


def describe(module: nn.Module) -> list[tuple[str, type, list[tuple[str, type]]]]:
    found = module.named_modules(remove_duplicate=False)
    return [(name, type(m), [(n, type(value)) for n, value in vars(m).items()]) for name, m in found]


def test_a_copy_has_the_structure_of_a_deep_copy_and_computes_the_same() -> None:
    original = model()
    copied, deep = copy_modules(original, memo_of(original)), copy.deepcopy(original, memo_of(original))
    assert describe(copied) == describe(deep)
    x = torch.ones(2, 4)
    assert torch.equal(copied(x), original(x))
    assert [id(b) for b in copied.buffers()] == [id(b) for b in original.buffers()], "those of the memo"
    assert copied.tied.inner.weight is copied.first.weight, "tied parameters stay tied"
    assert copied.layers[0] is copied.tied
    assert copied.counted.copies == 1, "it was copied in its own way"


def test_a_copy_refers_to_nothing_of_the_original_but_constants() -> None:
    original = model()
    copied = copy_modules(original, memo_of(original))
    assert not {id(m) for m in original.modules()} & {id(m) for m in copied.modules()}
    assert not {id(p) for p in original.parameters()} & {id(p) for p in copied.parameters()}
    scaled, before = copied.scaled, original.scaled
    assert scaled.sources == [copied.first]
    assert scaled.options["nested"]["layers"][0] is copied.first
    assert scaled.apply_inner.args == (scaled,)
    mutable = [
        (a, b) for a, b in zip(vars(scaled).values(), vars(before).values(), strict=True) if isinstance(b, dict | list | set)
    ]
    assert len(mutable) > 5
    assert all(a is not b for a, b in mutable)
    expected = original(torch.ones(2, 4))
    scaled.register_forward_hook(lambda _module, _inputs, output: output * 0)
    for parameter in copied.parameters():
        parameter.fill_(3.0)
    assert torch.equal(original(torch.ones(2, 4)), expected)
