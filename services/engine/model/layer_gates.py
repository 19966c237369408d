"""Make each layer of a model wait for its own weights before it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from services.engine.model.arriving import ArrivingWeights, ByteSpan
from services.engine.model.conversion import LateConversion


class LayerGates:
    """Hooks on a model whose parameters are still arriving.

    A layer waits for all of its parameters at once, and converts those that need a conversion. A
    module outside of the layers (embeddings, the last norm, the head) waits for its own parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        offset_of: Callable[[torch.Tensor], int | None],
        weights: ArrivingWeights,
        late: LateConversion | None = None,
        span_of: Callable[[str], ByteSpan] | None = None,
    ) -> None:
        """Install the hooks.

        Args:
            model: A model that is bound to the segment.
            offset_of: Offset of a tensor in the segment; None for a tensor outside of it.
            weights: The bytes that have arrived.
            late: The parameters to convert; None: there are none.
            span_of: Place in the segment of a tensor of the checkpoint, for `late`.
        """
        self._hooks: list[RemovableHandle] = []
        self._late = late
        for module, tensors in _iter_gated(model):
            spans, places = _spans(tensors, offset_of), frozenset[str]()
            if late is not None and span_of is not None:
                places = late.places(tensors)
                spans = sorted({*spans, *map(span_of, late.sources(places))})
            if spans:
                self._hooks.append(module.register_forward_pre_hook(_make_wait(weights, spans, late, places)))

    def remove(self) -> None:
        """Remove the hooks, on the computing thread or while it computes nothing.

        All weights have arrived. Weights that no step has read yet are converted now.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._late is not None:
            self._late.convert_rest()


def _make_wait(
    weights: ArrivingWeights, spans: Sequence[ByteSpan], late: LateConversion | None, places: frozenset[str]
) -> Callable[[torch.nn.Module, object], None]:
    def wait(_module: torch.nn.Module, _inputs: object) -> None:
        weights.wait(spans)
        if late is not None:
            late.convert(places)

    return wait


def _iter_gated(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    layers = dict(_layers(model))
    for layer in layers.values():
        yield layer, (*layer.parameters(), *layer.buffers())
    for name, module in model.named_modules():
        if any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            continue
        yield module, (*module.parameters(recurse=False), *module.buffers(recurse=False))


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
