"""A model that is ready to compute: its runner, its limits and what reads its requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from services.engine.domain.step_planning import BLOCK_TOKENS, Limits, LoraBudget, lora_budget
from services.engine.generation.embedding import Embedder
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.runner import WARM_UP, PackedRunner, Row, Runner, SequentialRunner
from services.engine.model import checkpoint, gpu_kv
from services.engine.model.bound_model import BoundModel, kv_token_bytes
from services.engine.model.gpu_kv import GpuKvMemory
from services.engine.model.model_files import ModelFiles
from services.engine.server.request_reader import Capacity, RequestReader
from services.engine.settings import EngineSettings
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.first_stage import FirstStageRunner
from services.engine.stages.part import StagePart
from shared.contracts.engine import EngineStart
from shared.errors import EngineFailed, InsufficientMemory


@dataclass(frozen=True)
class ReadyModel:
    """A model that is ready to compute.

    Attributes:
        runner: Generates; None for models that only embed.
        kv_memory: Memory of the KV cache, in pages that a GPU lends; None: torch allocates it.
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


def build_ready_model(
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

    The KV cache's bytes per token are measured then, and otherwise follow from the configuration.
    If a model of the same architecture has measured them in this process, nothing is computed.

    Args:
        lending: PCI bus id of the GPU whose pages the KV cache borrows.
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
        raise refuse_memory(start, block_bytes)
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


def refuse_memory(start: EngineStart, block_bytes: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"{start.kv_bytes} bytes of KV cache do not hold a block of {BLOCK_TOKENS} tokens ({block_bytes} bytes)"
    )


def _runner(bound: BoundModel, device: torch.device, start: EngineStart, settings: EngineSettings) -> Runner:
    context, stage = start.card.context_length, start.stage
    if stage is not None:
        part = StagePart(bound.model, stage.layers, device)
        return FirstStageRunner(part, stage.count, context, settings.stage_result_within)
    return PackedRunner(bound.model, device, context) if bound.is_packed else SequentialRunner(bound.model, device)


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
