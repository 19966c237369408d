"""Computes a part of a model: its layers, and what its first and last layer need.

The forward pass is transformers' own. It gets the hidden states of the stage before at its first
layer (a hook), and its last layer's output is taken by another hook. A step that was prepared calls
the layers directly (`prepared_step`). `model/stage_model` builds the part.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.engine.generation.kv_cache import PackedBatch, PackedCache, Slice, packed
from services.engine.stages.prepared_step import PreparedStep
from shared.contracts.stages import LayerRange
from shared.errors import UnsupportedArchitecture
from weights.formats.execution_order import Position, position_of

log = logging.getLogger(__name__)


class StagePart:
    """Computes a bound part of a model over packed sequences."""

    def __init__(self, model: PreTrainedModel, layers: LayerRange, device: torch.device) -> None:
        self.layers = layers
        self.device = device
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.dtype = model.dtype
        self._model = model
        self._incoming: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None
        decoder, found = _own_layers(model, layers)
        self._next_step = PreparedStep(model, decoder, found, layers, device)
        if not layers.is_first:
            found[0].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        if not layers.is_last:
            found[-1].register_forward_hook(self._keep_output)

    def compute(self, slices: Sequence[Slice], tokens: Sequence[int], hidden: torch.Tensor | None) -> torch.Tensor:
        """Compute new tokens of some sequences.

        Args:
            slices: The sequences, with the number of their new tokens.
            tokens: The new tokens of all, for the first stage.
            hidden: For other stages: their hidden states, [tokens, hidden size].

        Returns:
            Hidden states, [tokens, hidden size]; of the last stage logits after each sequence's
            last token, [sequences, vocabulary].
        """
        if all(part.count == 1 for part in slices) and self._next_step.is_prepared([part.start for part in slices]):
            with torch.inference_mode(), packed(PackedBatch(slices)):
                return self._next_step.compute(tokens, None if hidden is None else hidden.to(self.device)[None])[0].to(self.dtype)
        positions: list[int] = []
        last: list[int] = []
        for part in slices:
            positions += range(part.start, part.start + part.count)
            last.append(len(positions) - 1)
        arguments: dict[str, Any] = {
            "position_ids": torch.tensor([positions], device=self.device),
            "past_key_values": PackedCache(),
            "use_cache": True,
        }
        if hidden is None:
            arguments["input_ids"] = torch.tensor([list(tokens)], device=self.device)
        else:
            self._incoming = arguments["inputs_embeds"] = hidden.to(self.device)[None]
        try:
            with torch.inference_mode(), packed(PackedBatch(slices)):
                if self.layers.is_last:
                    logits: torch.Tensor = self._model(**arguments, logits_to_keep=torch.tensor(last, device=self.device)).logits[0]
                    return logits.to(self.dtype)
                self._model.base_model(**arguments)
            assert self._outgoing is not None, "the last layer's hook has run"
            return self._outgoing[0].to(self.dtype)
        finally:
            self._incoming = self._outgoing = None

    def prepare(self, positions: Sequence[int]) -> None:
        """Prepare a step of one token of each of some sequences, at these positions.

        `compute` uses it if the next step is that one. Call this while the stage has no other work.
        """
        try:
            self._next_step.prepare(positions)
        except Exception:  # steps do without it
            log.exception("failed to prepare a step")
            self._next_step.is_possible = False

    def _replace_input(
        self, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._incoming is None:
            return None  # the layer is called with its input
        if positional:
            return (self._incoming, *positional[1:]), named
        return positional, {**named, "hidden_states": self._incoming}

    def _keep_output(self, _: nn.Module, __: Any, output: Any) -> None:
        self._outgoing = output[0] if isinstance(output, tuple) else output


def _own_layers(model: PreTrainedModel, layers: LayerRange) -> tuple[nn.Module, list[nn.Module]]:
    """Return the decoder and the layers of a part, whose numbers are those of the whole model."""
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and str(layers.first) in module._modules
        if is_list and position_of(f"{name}.{layers.first}.weight") is Position.LAYER:
            return model.get_submodule(name.rpartition(".")[0]), list(module.children())
    raise UnsupportedArchitecture(f"{type(model).__name__} has no list of layers")
