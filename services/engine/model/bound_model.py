"""A model that is bound to its segment: its parameters are views of the weights' bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from services.engine.generation import attention
from services.engine.model import checkpoint, device_segment
from services.engine.model.architectures import Architecture, ModelCache
from services.engine.model.conversion import LateConversion
from services.engine.model.segment import Segment
from services.engine.model.stage_model import bind_part
from shared.contracts.engine import EngineStart
from shared.contracts.loader import WeightsAttached
from shared.contracts.segment import ArenaHandle, CudaIpcHandle, GpuUnitsHandle, PagesHandle


@dataclass
class BoundModel:
    """A model bound to its segment.

    Args:
        copied: Names of parameters outside the segment, because they are converted.
        architecture: Its common parts with other models, if the process keeps them.
        handle: Handle of the device memory, if the loader has loaded it.
        memory: The segment on the device, opened by `handle`; None if the loader has it only in
            host memory.
        late: Conversion of `copied` as their tensors arrive; None without any.
        is_partial: The segment in host memory lacks bytes that the device has (ADR 0058).
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    segment: Segment
    is_packed: bool
    copied: list[str]
    architecture: Architecture | None = None
    handle: ArenaHandle | None = None
    memory: torch.Tensor | None = None
    late: LateConversion | None = None
    is_partial: bool = False

    def addresses(self) -> tuple[tuple[int, int], ...]:
        """Return the host addresses at which weights are mapped: first and end of each range."""
        found = [self.segment.addresses]
        if self.memory is not None and self.memory.device.type == "cpu":
            found.append((self.memory.data_ptr(), self.memory.data_ptr() + self.memory.nbytes))
        return tuple(found)


def open_segment(attached: WeightsAttached) -> Segment:
    """Map the segment of attached weights. Raises as `Segment`."""
    return Segment(attached.segment, attached.extents, attached.weights_id)


def bind_model(
    directory: Path, attached: WeightsAttached, start: EngineStart, cache: ModelCache, segment: Segment | None = None
) -> BoundModel:
    """Build the model and bind it while its bytes are still loading.

    Args:
        segment: The segment of `attached`; None: it is mapped here.
    """
    attention.register()
    config = cache.config(directory, start.card)
    kind = checkpoint.model_class(config, start.card, directory)
    segment = segment or open_segment(attached)
    is_packed = start.card.info.task == "generate" and checkpoint.is_packable(config, kind)
    dtype = checkpoint.torch_dtype(start.card)
    if start.stage is not None:
        model: PreTrainedModel = bind_part(kind, config, segment, dtype, start.stage.layers)
        architecture = None
    else:
        model, architecture = cache.bind(kind, config, segment, dtype, start.card, is_packed=is_packed)
    copied = checkpoint.copied_parameters(model, segment)
    late = LateConversion(model, copied, segment.names()) if copied and start.stage is None else None
    bound = BoundModel(model, config, segment, is_packed, copied, architecture, late=late)
    if not isinstance(attached.handle, PagesHandle | GpuUnitsHandle):  # these are mapped when they are complete
        open_device_memory(bound, attached.handle)
    return bound


def open_device_memory(bound: BoundModel, handle: ArenaHandle | None) -> None:
    """Open the device memory of `handle`.

    Early calls create the GPU context while bytes are still loading.

    Raises:
        EngineFailed: The memory cannot be opened.
    """
    if handle != bound.handle:
        bound.memory = None
        if isinstance(handle, CudaIpcHandle):
            bound.memory = device_segment.open_on_gpu(handle)
        elif isinstance(handle, PagesHandle):
            bound.memory = device_segment.open_pages(handle)
        bound.handle = handle


def kv_token_bytes(bound: BoundModel) -> int | None:
    """Return the KV cache bytes per token by the configuration; None if it does not say."""
    config = bound.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    layers, hidden = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return None
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return 2 * layers * key_heads * width * int(bound.model.dtype.itemsize)
