"""The next step of a stage: calls its layers directly, with prepared arguments.

Before the first layer transformers computes rotary embeddings and masks, which depend on nothing
but the positions of the new tokens. A stage can guess the positions of its next step. So it
prepares the arguments of its layers while other stages compute, and hidden states that arrive go to
the layers at once.

The arguments are those that transformers' own forward pass gives to the layers. In that pass the
layers are replaced by functions that record them: no layer computes, and no weight of one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.engine.generation.kv_cache import PackedCache
from shared.contracts.stages import LayerRange


@dataclass(frozen=True)
class _Call:
    """A layer, and its arguments besides the hidden states."""

    layer: nn.Module
    positional: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class _SurroundingModules:
    """The modules that a part has before its layers and after them.

    Attributes:
        embed: Its output is the first layer's input, in the first stage.
        norm: Its input is the last layer's output, in the last stage, and its output that of the
            decoder.
        output: The type of the decoder's output.
    """

    embed: nn.Module | None
    norm: nn.Module | None
    output: Callable[..., Any]


@dataclass
class _Recording:
    """The calls of a forward pass without layers."""

    calls: list[_Call]
    passed: list[torch.Tensor]
    """Hidden states that each layer got."""
    modules: dict[nn.Module, tuple[Any, Any]]
    """Input and output of each module around the layers."""
    tokens: torch.Tensor | None = None
    """The input of the first stage."""


class PreparedStep:
    """The prepared arguments of a part's layers for one step of one token of each sequence."""

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, own: Sequence[nn.Module], layers: LayerRange, device: torch.device
    ) -> None:
        """Prepare nothing yet.

        Args:
            model: The part, as `stage_model.bind_part` builds it.
            decoder: The module whose forward pass calls the layers.
            own: The part's layers.
            layers: Their numbers.
            device: Of the part.
        """
        self._model, self._decoder, self._own, self._layers, self._device = model, decoder, own, layers, device
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        self._surrounding: _SurroundingModules | None = None
        self._calls: tuple[_Call, ...] = ()
        self._positions: tuple[int, ...] = ()
        self.is_possible = True
        """False: the model does more around its layers than `compute` would."""

    def is_prepared(self, positions: Sequence[int]) -> bool:
        """True if `compute` has the arguments for one token at each of these positions."""
        return bool(self._calls) and self._positions == tuple(positions)

    def prepare(self, positions: Sequence[int]) -> None:
        """Prepare a step of one token at each of these positions, if it `is_possible`."""
        self._calls, self._positions = (), tuple(positions)
        if not self.is_possible:
            return
        found = self._record()
        if self._surrounding is None:
            self._surrounding = self._find_surrounding(found)
            self.is_possible = self._surrounding is not None
        if self.is_possible:
            self._calls = tuple(found.calls)

    def compute(self, tokens: Sequence[int], hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute the step that is prepared.

        Args:
            tokens: One of each sequence, for the first stage.
            hidden: For other stages: their hidden states, [1, sequences, hidden size].

        Returns:
            Hidden states, [1, sequences, hidden size]; of the last stage logits, [1, sequences,
            vocabulary].
        """
        surrounding = self._surrounding
        assert surrounding is not None, "the step is prepared"
        if hidden is not None:
            state = hidden
        else:
            assert surrounding.embed is not None, "the first stage has the embeddings"
            state = surrounding.embed(torch.tensor([list(tokens)], device=self._device))
        for call in self._calls:
            state = call.layer(state, *call.positional, **call.named)
        if not self._layers.is_last:
            return state
        assert surrounding.norm is not None, "the last stage has the norm"
        output = surrounding.output(last_hidden_state=surrounding.norm(state))
        with _replaced({self._decoder: lambda *_, **__: output}):
            logits: torch.Tensor = self._model(inputs_embeds=state, use_cache=True).logits
        return logits

    def _record(self) -> _Recording:
        """Run the forward pass without layers, at the positions to prepare."""
        found = _Recording([], [], {})

        def record(layer: nn.Module, hidden: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
            found.calls.append(_Call(layer, positional, named))
            found.passed.append(hidden)
            return hidden

        def keep(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            found.modules[module] = (given[0] if given else None), output

        count = len(self._positions)
        arguments: dict[str, Any] = {
            "position_ids": torch.tensor([self._positions], device=self._device),
            "past_key_values": PackedCache(),
            "use_cache": True,
        }
        if self._layers.is_first:
            arguments["input_ids"] = found.tokens = torch.zeros((1, count), dtype=torch.long, device=self._device)
        else:
            arguments["inputs_embeds"] = torch.zeros((1, count, self._hidden_size), dtype=self._model.dtype, device=self._device)
        around: list[nn.Module] = []
        if self._surrounding is None:
            around = [self._decoder, *(m for m in self._decoder.modules() if not any(m.children()))]
        hooks = [module.register_forward_hook(keep) for module in around]
        try:
            with torch.inference_mode(), _replaced({layer: partial(record, layer) for layer in self._own}):
                self._model.base_model(**arguments)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _find_surrounding(self, found: _Recording) -> _SurroundingModules | None:
        """Return the modules around the layers; None if the model computes more there."""
        first = found.passed[0]
        if any(passed is not first for passed in found.passed):
            return None
        output = found.modules[self._decoder][1]
        embed = norm = None
        if self._layers.is_first:
            embed = next((m for m, (given, out) in found.modules.items() if given is found.tokens and out is first), None)
            if embed is None:
                return None
        if self._layers.is_last:
            last = output.last_hidden_state
            norm = next((m for m, (given, out) in found.modules.items() if given is first and out is last), None)
            if norm is None:
                return None
        return _SurroundingModules(embed, norm, type(output))


@contextmanager
def _replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward functions of modules inside this context."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward
