"""Build the part of a model that a pipeline stage computes.

transformers builds the whole model on the meta device, which takes no memory. Layers of other
stages are removed before any parameter is bound, and modules outside of the layers (embeddings,
norm, head) are replaced by stand-ins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from services.engine.model import checkpoint
from services.engine.model.segment import Segment
from shared.contracts.stages import STAGEABLE, LayerRange
from shared.errors import UnsupportedArchitecture
from weights.formats.execution_order import Position, position_of
from weights.formats.stages import is_of_stage


class _NoOffset(nn.Module):
    """Stands for embeddings of an earlier stage: their sum is in the hidden states already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


class _Unchanged(nn.Module):
    """Stands for a norm or a head of a later stage."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


def bind_part(
    kind: type[PreTrainedModel], config: PreTrainedConfig, segment: Segment, dtype: torch.dtype, layers: LayerRange
) -> PreTrainedModel:
    """Build the part of a model with `layers`, its parameters bound to the segment.

    Raises:
        UnsupportedArchitecture: This architecture is not tested in stages, or has not as many
            layers.
        CheckpointInvalid: As `checkpoint.bind`.
    """
    if config.model_type not in STAGEABLE or not checkpoint.is_packable(config, kind):
        raise UnsupportedArchitecture(
            f"Models of type {config.model_type!r} cannot be divided into stages. Unset the model's `stages`"
        )
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        raise UnsupportedArchitecture("Models with projected embeddings cannot be divided into stages. Unset the model's `stages`")
    part = _part_class(kind, layers)
    tensors = {name: tensor for name, tensor in segment.tensors().items() if is_of_stage(name, layers, is_tied=True)}
    return checkpoint.bind(part, config, tensors, dtype, is_packed=True)


def _part_class(kind: type[PreTrainedModel], layers: LayerRange) -> type[PreTrainedModel]:
    """Return a class whose instances have only these layers; transformers loads it as `kind`."""

    def build(self: PreTrainedModel, config: PreTrainedConfig, *arguments: Any, **named: Any) -> None:
        kind.__init__(self, config, *arguments, **named)
        _prune(self, layers)

    part: type[PreTrainedModel] = type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
    return part


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the list of a decoder's layers, and its name.

    Raises `UnsupportedArchitecture` without one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and position_of(f"{name}.0.weight") is Position.LAYER:
            return name, module
    raise UnsupportedArchitecture(f"{type(model).__name__} has no list of layers. Unset the model's `stages`")


def _prune(model: PreTrainedModel, layers: LayerRange) -> None:
    """Remove what belongs to other stages."""
    path, found = find_layers(model)
    if len(found) != layers.total:
        raise UnsupportedArchitecture(f"{type(model).__name__} has {len(found)} layers, not {layers.total}")
    for number in range(layers.total):
        if not layers.first <= number < layers.end:
            del found._modules[str(number)]  # the others keep their numbers, which are in the names of tensors
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, module in list(model.named_modules()):
        if name.startswith(f"{path}.") or not any(True for _ in module.parameters(recurse=False)):
            continue
        if not is_of_stage(f"{name}.weight", layers, is_tied=is_tied):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _NoOffset() if isinstance(module, nn.Embedding) else _Unchanged())
    if not (is_tied and layers.is_last):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._tied_weights_keys = {}
                module.all_tied_weights_keys = {}
