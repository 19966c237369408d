"""Compute the device memory that an instance of a model needs.

The scheduler, the command line and the tests use this one formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.models import ModelCard

MIB = 1024 * 1024
MIN_KV_BYTES = 32 * MIB
ATTACHED_BYTES = 4 * MIB
"""Private memory of an instance in an executor, besides its KV cache: modules and requests."""
FLOOR_TOKENS = 1024
"""The floor of a KV cache that borrows pages has room for a sequence of this many tokens."""
PAGE_BYTES = 2 * MIB
VLLM_RANK = 16
"""The default of vLLM's `max_lora_rank`."""
FULL_CONTEXTS = 2
"""KV for this many sequences of full length by default (fewer if `max_concurrency` is less);
shorter ones share it.
"""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Need:
    """Bytes that an instance needs, by kind.

    Attributes:
        converted: A copy of the weights in another dtype.
        kv_floor: The part of `kv` that an instance needs for itself where KV caches borrow pages.
        executor: Needed once on a device, by the process of all shared instances; no part of
            `total`.
        total: The bytes to reserve.
    """

    weights: int
    converted: int
    kv: int
    runtime: int
    kv_floor: int = 0
    executor: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.converted + self.kv + self.runtime


_KNOWN: dict[int, tuple[ModelCard, Need]] = {}
_KNOWN_LIMIT = 16_384


def need_of(card: ModelCard) -> Need:
    """Return the reservation for one instance of `card`; the result is cached.

    `engine_args.kv_cache_bytes` overrides the share of the KV cache;
    `engine_args.adapter_cache_bytes` are added to it for LoRA adapters alone. A `dtype` other than
    the checkpoint's needs a second, converted copy beside the shared one; an engine that reads the
    weights itself holds only that copy. vLLM with Thaw's loader copies the shared weights while it
    starts. `memory` overrides the total.
    """
    known = _KNOWN.get(id(card))
    if known is not None and known[0] is card:
        return known[1]
    if len(_KNOWN) >= _KNOWN_LIMIT:
        _KNOWN.clear()
    need = _compute_need(card)
    _KNOWN[id(card)] = (card, need)
    return need


def _compute_need(card: ModelCard) -> Need:
    info, spec = card.info, card.spec
    weights, converted = info.weights_bytes, 0
    if spec.dtype != "auto" and spec.dtype != info.dtype:
        converted = info.parameters * _ITEM_BYTES[spec.dtype]
        if spec.loads_itself:
            weights, converted = converted, 0
    elif spec.engine != "builtin" and not spec.loads_itself:
        converted = weights
    kv = floor = 0
    if info.task == "generate":
        contexts = min(FULL_CONTEXTS, spec.max_concurrency)
        per_token = info.kv_bytes_per_token
        if spec.dtype != "auto" and info.dtype in _ITEM_BYTES:  # keys and values are of the type that is computed in
            per_token = per_token * _ITEM_BYTES[spec.dtype] // _ITEM_BYTES[info.dtype]
        kv = max(MIN_KV_BYTES, card.context_length * per_token * contexts)
        adapters = int(spec.engine_args.get("adapter_cache_bytes", 0))
        kv = int(spec.engine_args.get("kv_cache_bytes", kv)) + adapters
        floor = min(card.context_length, FLOOR_TOKENS) * per_token + adapters
        floor = min(kv, -(-floor // PAGE_BYTES) * PAGE_BYTES) if per_token else kv
    runtime, executor = card.capabilities.runtime_bytes + _lora_slot_bytes(card), 0
    if stages := card.stages:
        # Devices of a set are booked evenly: each has room for the largest stage.
        assert info.layers is not None
        total, most, count = info.layers.count, max(s.count for s in stages), len(stages)
        rounding = max(0, info.page_bytes - info.weights_bytes) + 2 * PAGE_BYTES  # of a device with pages of its own
        weights, runtime = count * (max(info.layers.bytes_of(s) for s in stages) + rounding), count * runtime
        converted, kv = (-(-nbytes * most // total) * count for nbytes in (converted, kv))
        floor = kv
    if spec.may_share:
        runtime, executor = min(runtime, ATTACHED_BYTES), runtime
    need = Need(weights, converted, kv, runtime, floor, executor)
    return need if spec.memory is None else _fit_to_memory(need, spec.memory)


def _lora_slot_bytes(card: ModelCard) -> int:
    """Bytes that vLLM reserves for the LoRA adapters of a batch, beside the weights.

    Each of `max_loras` slots has room for an adapter of the greatest rank on every linear layer.
    """
    args = card.spec.engine_args
    if card.spec.engine != "vllm" or not args.get("enable_lora"):
        return 0
    rank, slots = int(args.get("max_lora_rank", VLLM_RANK)), int(args.get("max_loras", 1))
    item = _ITEM_BYTES.get(card.info.dtype if card.spec.dtype == "auto" else card.spec.dtype, _ITEM_BYTES["float32"])
    return slots * rank * item * sum(m.count * (m.rows + m.columns) for m in card.info.modules)


def _fit_to_memory(need: Need, memory: int) -> Need:
    """Fit `need` to the operator's total.

    After the weights, the runtime precedes the KV cache, up to half of the remainder.
    """
    weights = min(need.weights, memory)
    converted = min(need.converted, memory - weights)
    rest = memory - weights - converted
    kv = min(need.kv, max(rest - need.runtime, rest // 2))
    return Need(weights, converted, kv, rest - kv, min(need.kv_floor, kv), need.executor)


def find_most_bytes(usual_bytes: int) -> int:
    """Return the most bytes that an engine uses without a leak, if it usually has `usual_bytes`.

    Nodes restart engines with a leak, and the scheduler does not book what a leak has added.
    """
    return max(int(1.25 * usual_bytes), usual_bytes + 64 * MIB)
