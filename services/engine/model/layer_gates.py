"""Make each layer of a model wait for its own weights before it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from services.engine.model.arriving import ArrivingWeights, ByteSpan


class LayerGates:
    """Hooks on a model whose parameters are still arriving.

    A decoder layer waits for all of its parameters at once. A module outside of the layers
    (embeddings, the last norm, the head) waits for its own.
    """

    def __init__(self, model: torch.nn.Module, offset_of: Callable[[torch.Tensor], int | None], weights: ArrivingWeights) -> None:
        """Install the hooks.

        Args:
            model: A model that is bound to the segment.
            offset_of: Offset of a tensor in the segment; None for one that is elsewhere.
            weights: What has arrived.
        """
        self._hooks: list[RemovableHandle] = []
        for module, spans in _iter_gated(model, offset_of):
            self._hooks.append(module.register_forward_pre_hook(_make_wait(weights, spans)))

    def remove(self) -> None:
        """Remove the hooks, on the computing thread or while it computes nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _make_wait(weights: ArrivingWeights, spans: Sequence[ByteSpan]) -> Callable[[torch.nn.Module, object], None]:
    def wait(_module: torch.nn.Module, _inputs: object) -> None:
        weights.wait(spans)

    return wait


def _iter_gated(
    model: torch.nn.Module, offset_of: Callable[[torch.Tensor], int | None]
) -> Iterator[tuple[torch.nn.Module, list[ByteSpan]]]:
    layers = dict(_layers(model))
    for layer in layers.values():
        if spans := _spans((*layer.parameters(), *layer.buffers()), offset_of):
            yield layer, spans
    for name, module in model.named_modules():
        if any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            continue
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if spans := _spans(own, offset_of):
            yield module, spans


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the members of the outermost module lists."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            yield from ((f"{name}.{child}", layer) for child, layer in module.named_children())


def _spans(tensors: Iterable[torch.Tensor], offset_of: Callable[[torch.Tensor], int | None]) -> list[ByteSpan]:
    places = {(offset_of(t), t.nbytes) for t in tensors if t.nbytes}
    return sorted((offset, offset + nbytes) for offset, nbytes in places if offset is not None)
