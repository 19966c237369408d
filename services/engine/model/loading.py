"""Loading a model: from a segment to an engine that can compute.

Runs in threads; the event loop only awaits it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from services.engine.domain.step_planning import BLOCK_TOKENS, Limits, LoraBudget, lora_budget
from services.engine.generation import attention, lora_layers
from services.engine.generation.embedding import Embedder, Pooling, read_pooling
from services.engine.generation.kv_bytes import layout_of
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import WARM_UP, PackedRunner, Row, Runner, SequentialRunner
from services.engine.loader_client import LoaderClient, holder_of
from services.engine.model import checkpoint, device_segment, gpu_kv, gpu_units
from services.engine.model.architectures import Architecture, ModelCache
from services.engine.model.arriving import ArrivingPages, ArrivingWeights
from services.engine.model.conversion import LateConversion
from services.engine.model.gpu_kv import GpuKvMemory
from services.engine.model.gpu_units import ArrivingUnits
from services.engine.model.layer_gates import LayerGates
from services.engine.model.segment import Segment
from services.engine.model.stage_model import bind_part
from services.engine.server.request_reader import Capacity, RequestReader
from services.engine.settings import EngineSettings
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.first_stage import FirstStageRunner
from services.engine.stages.part import StagePart
from services.engine.tokenization import Tokenization
from shared.contracts.engine import EngineStart
from shared.contracts.kv_transfer import KvLayout
from shared.contracts.loader import WeightsAttached
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard
from shared.contracts.segment import ArenaHandle, CudaIpcHandle, GpuUnitsHandle, PagesHandle
from shared.errors import EngineFailed, InsufficientMemory, from_body

log = logging.getLogger(__name__)
Until = Literal["index", "complete"]
"""What an attach waits for: the tensors' locations, or all bytes."""


@dataclass(frozen=True)
class ModelFiles:
    """The contents of the model's small files."""

    tokenization: Tokenization
    generation_defaults: Mapping[str, Any]
    pooling: Pooling


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


@dataclass(frozen=True)
class ReadyModel:
    """A model that is ready to compute.

    `runner` is None for models that only embed. `kv_memory`: memory of the KV cache, in pages that
    a GPU lends; None: torch allocates it.
    """

    runner: Runner | None
    embedder: Embedder
    reader: RequestReader
    limits: Limits
    block_bytes: int
    model: PreTrainedModel
    device: torch.device
    room: LoraBudget
    kv_memory: GpuKvMemory | None = None


def read_files(directory: Path, start: EngineStart, cache: ModelCache) -> ModelFiles:
    return ModelFiles(
        cache.tokenization(directory, trust_remote_code=start.card.spec.trust_remote_code),
        checkpoint.read_generation_defaults(directory),
        read_pooling(directory, causal=start.card.info.task == "generate"),
    )


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
    return _build_ready_model(bound, device, files, start, settings, is_early=True, lending=lending), gates


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
    return _build_ready_model(bound, device, files, start, settings, ring=ring, lending=lending)


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
        raise _no_block(start, state.nbytes)
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


def _build_ready_model(
    bound: BoundModel,
    device: torch.device,
    files: ModelFiles,
    start: EngineStart,
    settings: EngineSettings,
    *,
    is_early: bool = False,
    ring: tuple[Inbound, Outbound] | None = None,
    lending: str | None = None,
) -> ReadyModel:
    """Make the parts that compute, and compute a few tokens, unless `is_early`.

    `lending`: PCI bus id of the GPU whose pages the KV cache borrows.

    The KV cache's bytes per token are measured then, and otherwise follow from the configuration.
    If a model of the same architecture has measured them in this process, nothing is computed.
    """
    known = bound.architecture.token_bytes if bound.architecture is not None else None
    causal = start.card.info.task == "generate"
    embedder = Embedder(bound.model, device, files.pooling, causal=causal, is_packed=bound.is_packed)
    runner: Runner | None = None
    memory: GpuKvMemory | None = None
    block_bytes = 1
    if causal:
        runner = _runner(bound, device, start, settings)
        token_bytes = known or (kv_token_bytes(bound) if is_early else None) or _warm_up(runner, start)
        if bound.architecture is not None:
            bound.architecture.token_bytes = token_bytes
        block_bytes = token_bytes * BLOCK_TOKENS
        if lending is not None:
            memory = _borrow_memory(runner, lending, token_bytes, start)
            block_bytes = memory.block_bytes
    elif not is_early:
        embedder.embed([WARM_UP], None)
    reserved = int(start.card.spec.engine_args.get("adapter_cache_bytes", 0)) if causal else 0
    kv_blocks = max(0, start.kv_bytes - reserved) // block_bytes if causal else 0
    if isinstance(runner, FirstStageRunner) and ring is not None:
        runner.connect(*ring)
        kv_blocks = runner.agree_on_capacity(kv_blocks)
    limits = Limits(
        start.card.spec.max_concurrency,
        kv_blocks,
        settings.engine_step_tokens,
        settings.engine_chunk_tokens,
    )
    if causal and limits.kv_blocks < 1:
        raise _no_block(start, block_bytes)
    vocabulary = int(bound.model.get_input_embeddings().weight.shape[0])
    capacity = Capacity(start.card.context_length, limits.kv_tokens, vocabulary)
    eos = checkpoint.eos_tokens(bound.config, files.generation_defaults, files.tokenization.tokenizer.eos_token_id)
    can_embed = start.stage is None
    reader = RequestReader(
        files.tokenization,
        capacity,
        eos,
        files.generation_defaults,
        causal,
        start.card.info.revision,
        can_embed,
        start.card.spec.tool_call_parser,
    )
    room = lora_budget(start.kv_bytes if causal else 0, block_bytes, reserved, min(capacity.context, capacity.kv_tokens))
    return ReadyModel(runner, embedder, reader, limits, block_bytes, bound.model, device, room, memory)


def _borrow_memory(runner: Runner, bus_id: str, token_bytes: int, start: EngineStart) -> GpuKvMemory:
    """Have the runner keep keys and values in pages that the GPU lends (ADR 0107).

    Raises:
        EngineFailed: The architecture keeps them in transformers' own cache.
    """
    if not isinstance(runner, PackedRunner):
        raise EngineFailed(
            f"The KV cache of {start.card.name} cannot borrow pages of {start.device}: its architecture has a cache of its own. "
            "Unset THAW_CUDA_LEND_KV"
        )
    memory = GpuKvMemory(gpu_kv.open_gpu(bus_id), token_bytes, start.card.context_length)
    runner.kv_memory = memory
    return memory


def _no_block(start: EngineStart, block_bytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"{start.kv_bytes} bytes of KV cache do not hold a block of {BLOCK_TOKENS} tokens ({block_bytes} bytes)"
    )


def _runner(bound: BoundModel, device: torch.device, start: EngineStart, settings: EngineSettings) -> Runner:
    context, stage = start.card.context_length, start.stage
    if stage is not None:
        part = StagePart(bound.model, stage.layers, device)
        return FirstStageRunner(part, stage.count, context, settings.stage_result_within)
    return PackedRunner(bound.model, device, context) if bound.is_packed else SequentialRunner(bound.model, device)


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


def _warm_up(runner: Runner, start: EngineStart) -> int:
    """Compute a few tokens and return the KV cache bytes per token."""
    state = runner.new_state()
    compute = runner.compute_own if isinstance(runner, FirstStageRunner) else runner.forward
    compute([Row(state, 0, WARM_UP)])
    if isinstance(state, SequenceKV):
        return state.nbytes // BLOCK_TOKENS
    return _cache_bytes(state) // len(WARM_UP) or start.card.info.kv_bytes_per_token or 1


def _cache_bytes(cache: DynamicCache) -> int:
    held = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.nbytes for t in held if isinstance(t, torch.Tensor))
