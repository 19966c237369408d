"""Loading a model: from a segment to an engine that can compute.

Runs in threads; the event loop only awaits it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from services.engine.generation import lora_layers
from services.engine.generation.kv_bytes import layout_of
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import WARM_UP
from services.engine.loader_client import LoaderClient, holder_of
from services.engine.model import checkpoint, device_segment, gpu_units
from services.engine.model.arriving import ArrivingPages, ArrivingWeights
from services.engine.model.bound_model import BoundModel, kv_token_bytes, open_device_memory
from services.engine.model.gpu_units import ArrivingUnits
from services.engine.model.layer_gates import LayerGates
from services.engine.model.model_files import ModelFiles
from services.engine.model.ready_model import ReadyModel, build_ready_model, refuse_memory
from services.engine.model.segment import Segment
from services.engine.settings import EngineSettings
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.part import StagePart
from shared.contracts.engine import EngineStart
from shared.contracts.kv_transfer import KvLayout
from shared.contracts.loader import WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.segment import ArenaHandle, GpuUnitsHandle, PagesHandle
from shared.errors import EngineFailed, from_body

log = logging.getLogger(__name__)
Until = Literal["index", "complete"]
"""The condition that an attach waits for: the tensors' locations, or all bytes."""


@dataclass(frozen=True)
class MappedPages:
    """Weights that are mapped in the device's pages, and the loader's latest answer about them."""

    attached: WeightsAttached
    memory: torch.Tensor

    def give_to(self, bound: BoundModel) -> None:
        """Have `bound` use this mapping."""
        bound.memory, bound.handle = self.memory, self.attached.handle


async def map_pages(
    attached: WeightsAttached,
    start: EngineStart,
    weights: LoaderClient,
    run: Callable[[Callable[[], torch.Tensor]], Awaitable[torch.Tensor]],
) -> MappedPages:
    """Map the weights in the device's pages, and make sure that they are still this instance's.

    The loader gives pages to others only when no process maps them: after the second answer it
    sees this process's mapping.

    Args:
        run: Runs a function on a thread.

    Raises the loader's error if the weights are not on the device.
    """
    while True:
        check_device(attached)
        if not isinstance(attached.handle, PagesHandle):
            raise EngineFailed(f"The loader has no memory for {start.device}: set THAW_DEVICES for both services alike")
        memory = await run(partial(device_segment.open_pages, attached.handle))
        confirmed = await weights.attach(start.card, weights.holder, "complete")
        if confirmed.handle == attached.handle:
            return MappedPages(confirmed, memory)
        log.warning("the loader was restarted and has copied the weights again; mapping again")
        attached = confirmed


def check_device(attached: WeightsAttached) -> None:
    """Raise the loader's error if the weights are not on a device that the engine needs them on."""
    if attached.device_error is not None:
        raise from_body(attached.device_error)


def check_isolation(handle: ArenaHandle | None, *, is_shared: bool) -> None:
    """Refuse units on a GPU in a process of several models.

    The loader takes units back when the process that maps them has exited.

    Raises:
        EngineFailed: The process is shared, and the handle is one of units on a GPU.
    """
    if is_shared and isinstance(handle, GpuUnitsHandle):
        raise EngineFailed("Units on a GPU need a process for each model. Unset the model's isolation, or THAW_CUDA_REUSE_BYTES")


def can_overlap(bound: BoundModel, start: EngineStart) -> bool:
    """True if the model can compute while its weights arrive.

    Its architecture must be one of those whose layers are tested to wait for their weights
    (`checkpoint.PACKABLE`, `checkpoint.EMBEDDING`). Every parameter must be read where the loader
    puts it, or the tensors that it is converted from must be known. On a GPU no parameter is
    converted before all are there.
    """
    embeds = start.card.info.task == "embed" and bound.config.model_type in checkpoint.EMBEDDING
    return (
        (embeds or (bound.is_packed and kv_token_bytes(bound) is not None))
        and (bound.late is None or bound.late.is_possible)
        and (start.device.startswith("cpu") or not bound.copied)
        and not any((bound.segment.offset_of(p) or 0) % p.itemsize for p in bound.model.parameters())
    )


def has_own_memory(start: EngineStart) -> bool:
    """True if the weights are copied to the instance's device, and computed from there."""
    return start.separate_memory or start.device.startswith("cuda:")


def begin(
    bound: BoundModel,
    files: ModelFiles,
    start: EngineStart,
    settings: EngineSettings,
    weights: ArrivingWeights,
    pages: ArrivingPages | ArrivingUnits | None,
) -> tuple[ReadyModel, LayerGates]:
    """Make a bound model ready to compute while its weights arrive: each layer waits for its own.

    Args:
        bound: A model that `can_overlap`.
        files: Its small files.
        start: The instance to serve.
        settings: Settings of the process.
        weights: The bytes that have arrived.
        pages: The pages that the weights arrive in; None: the segment in host memory.

    Raises:
        InsufficientMemory: The KV cache's bytes hold no block.
    """
    gates = LayerGates(bound.model, bound.segment.offset_of, weights, bound.late, bound.segment.span)
    if bound.late is not None:
        read = bound.segment.tensor
        bound.late.read_from(read if pages is None else device_segment.tensor_in_pages(pages.layout, bound.segment, pages.memory))
    if pages is not None:
        place = device_segment.offsets_in_pages(pages.layout, bound.segment.offset_of)
        device_segment.rebind(bound.model, place, pages.memory)
        bound.memory = pages.memory
    device = pages.memory.device if pages is not None else torch.device("cpu")
    lending = pages.layout.bus_id if pages is not None and pages.layout.lends_kv else None
    return build_ready_model(bound, device, files, start, settings, is_early=True, lending=lending), gates


def complete(
    bound: BoundModel,
    files: ModelFiles,
    start: EngineStart,
    settings: EngineSettings,
    handle: ArenaHandle | None = None,
    ring: tuple[Inbound, Outbound] | None = None,
) -> ReadyModel:
    """Finish a bound model once every byte is loaded, and warm it up.

    Converts parameters where needed, binds to the device's memory (`handle`) or moves there, and
    computes a few tokens. The first stage of a group waits for the other stages (`ring`).

    Raises:
        InsufficientMemory: The KV cache's bytes hold no block.
        EngineFailed: The GPU lends pages, and the model's keys and values cannot be mapped there.
        RunnerLost: A stage of the group has ended.
    """
    lending = handle.bus_id if isinstance(handle, GpuUnitsHandle) and handle.lends_kv and start.stage is None else None
    device = _finish_binding(bound, start, settings, handle)
    return build_ready_model(bound, device, files, start, settings, ring=ring, lending=lending)


@dataclass(frozen=True)
class ReadyPart:
    """The part of a later stage, the KV blocks that it can hold, and their layout."""

    part: StagePart
    kv_blocks: int
    layout: KvLayout


def complete_part(bound: BoundModel, start: EngineStart, settings: EngineSettings, handle: ArenaHandle | None = None) -> ReadyPart:
    """Finish the part of a later stage once every byte is loaded, and warm it up.

    Raises:
        InsufficientMemory: The KV cache's bytes hold no block.
    """
    assert start.stage is not None
    part = StagePart(bound.model, start.stage.layers, _finish_binding(bound, start, settings, handle))
    state = SequenceKV()
    part.compute([Slice(state, 0, len(WARM_UP))], (), torch.zeros(len(WARM_UP), part.hidden_size, dtype=part.dtype))
    blocks = start.kv_bytes // state.nbytes
    if blocks < 1:
        raise refuse_memory(start, state.nbytes)
    return ReadyPart(part, blocks, layout_of(state))


def stage_data_bytes(bound: BoundModel, start: EngineStart, settings: EngineSettings) -> int:
    """Return the most bytes of data in a frame that a stage receives.

    They are the hidden states of a step, or a sequence's tokens; for the first stage its logits.
    """
    assert start.stage is not None
    config = bound.config.get_text_config()
    sequences = start.card.spec.max_concurrency + 1
    if start.stage.is_first:
        return int(config.vocab_size) * sequences * torch.float32.itemsize
    hidden_states = int(config.hidden_size) * (settings.engine_step_tokens + sequences)
    return max(hidden_states, start.card.context_length) * torch.float32.itemsize


def _finish_binding(bound: BoundModel, start: EngineStart, settings: EngineSettings, handle: ArenaHandle | None) -> torch.device:
    """Convert parameters where needed, and bind to the device's memory or move there."""
    if isinstance(handle, GpuUnitsHandle) and handle != bound.handle:
        path = loader_socket(settings.node_state)
        bound.memory = gpu_units.open_units(handle, path, holder_of(start), bound.segment.header.weights_id)
        bound.handle = handle
    if bound.copied:
        # The earlier conversion may have read bytes that host memory did not have.
        log.info("parameters are converted, not shared", extra={"count": len(bound.copied), "first": bound.copied[0]})
        open_device_memory(bound, handle)
        if isinstance(bound.handle, GpuUnitsHandle) and bound.memory is not None and bound.is_partial:
            _read_back(bound, bound.handle, bound.memory)
        source = bound.segment.tensors()
        if isinstance(bound.handle, PagesHandle) and bound.memory is not None:
            source = device_segment.tensors_in_pages(bound.handle, bound.segment, bound.memory)
        dtype = checkpoint.torch_dtype(start.card)
        bound.model = checkpoint.bind(type(bound.model), bound.config, source, dtype, is_packed=bound.is_packed)
    open_device_memory(bound, handle)
    return _to_device(bound, start)


def _read_back(bound: BoundModel, handle: GpuUnitsHandle, memory: torch.Tensor) -> None:
    """Copy from the GPU what parameters are converted from, into this process's private segment."""
    names = bound.segment.names()
    if bound.late is not None and bound.late.is_possible:
        names = tuple(bound.late.all_sources())
    read = device_segment.tensor_in_pages(handle, bound.segment, memory)
    for name in names:
        bound.segment.tensor(name).copy_(read(name))


def _to_device(bound: BoundModel, start: EngineStart) -> torch.device:
    if bound.memory is not None:
        offset_of: Callable[[torch.Tensor], int | None] = bound.segment.offset_of
        if isinstance(bound.handle, PagesHandle | GpuUnitsHandle):
            offset_of = device_segment.offsets_in_pages(bound.handle, bound.segment.offset_of)
        copied = device_segment.rebind(bound.model, offset_of, bound.memory, is_loaded=True)
        log.info("weights are mapped on the device", extra={"device": str(bound.memory.device), "copied_bytes": copied})
        return bound.memory.device
    device = torch_device(start.device)
    if device.type != "cpu":
        bound.model.to(device)
    return device


def bind_lora(computable: ReadyModel, card: ModelCard, attached: WeightsAttached) -> LoraAdapter:
    """Build an adapter from its loaded weights.

    Raises `CheckpointInvalid` if it does not fit the model.
    """
    tensors = Segment(attached.segment, attached.extents, attached.weights_id).tensors()
    return lora_layers.parse(card, tensors, computable.model, computable.device)


def torch_device(name: str) -> torch.device:
    """torch's device. `cpu:0` is a share of host memory; torch knows one CPU."""
    return torch.device("cpu") if name.startswith("cpu") else torch.device(name)
