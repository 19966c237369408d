"""LoRA adapters in the catalogue: each fits a base model, whose instances serve it.

1. A spec with a base needs an adapter's files; a spec without one needs a whole model's.
2. The base is registered (or is being registered in the same command), is no adapter itself,
   generates text, and has an engine that runs adapters.
3. Every matrix that the adapter changes exists in the base, with that shape, in as many layers.

The engine refuses at load time what only the built model shows (matrices that are not linear).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.contracts.engines import CAPABILITIES
from shared.contracts.model_info import AdapterInfo, LinearShape, ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.errors import CheckpointInvalid, Conflict, InvalidModel, InvalidRequest, ModelNotFound, UnsupportedArchitecture
from shared.sizing import VLLM_RANK

_SHOWN = 8
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `max_lora_rank` may have (vllm/config/lora.py, 0.32)."""


def check_lora_options(spec: ModelSpec) -> None:
    """Raise `InvalidRequest` for options of vLLM's LoRA from which no memory can be computed."""
    if spec.engine != "vllm" or not spec.engine_args.get("enable_lora"):
        return
    for name in ("max_lora_rank", "max_loras"):
        value = spec.engine_args.get(name, 1)
        if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
            raise InvalidRequest(
                f"{spec.name}: engine_args.{name} is {value!r:.80}, which is not a whole number, 1 or more", param="engine_args"
            )


def base_of(spec: ModelSpec, cards: Mapping[str, ModelCard]) -> ModelCard | None:
    """Return the card of the adapter's base; None for a model.

    Args:
        spec: The adapter's spec.
        cards: All models after the command, by name.

    Raises:
        ThawError: Rule 2 does not hold.
    """
    if spec.base is None:
        return None
    base = cards.get(spec.base)
    if base is None:
        known = ", ".join(sorted(n for n, c in cards.items() if c.spec.base is None)[:_SHOWN]) or "none"
        raise ModelNotFound(
            f"{spec.name} is for the model {spec.base!r}, which is not registered; registered: {known}", param="base"
        )
    if base.spec.base is not None:
        raise InvalidRequest(f"{spec.name} is for {base.name}, which is an adapter itself (of {base.spec.base})", param="base")
    if not base.capabilities.lora:
        served = ", ".join(engine for engine, can in CAPABILITIES.items() if can.lora)
        raise UnsupportedArchitecture(
            f"{spec.name} is for {base.name}, whose engine is {base.spec.engine}; engines that serve adapters: {served}",
            param="base",
        )
    if base.spec.engine == "vllm":
        _check_vllm(spec, base.spec)
    if base.spec.stages > 1:
        raise InvalidRequest(f"{spec.name} is for {base.name}, which runs in stages; these serve no adapters yet", param="base")
    if base.info.task != "generate":
        raise UnsupportedArchitecture(
            f"{spec.name} is for {base.name}, which embeds; adapters are for models that generate", param="base"
        )
    return base


def resolve_info(spec: ModelSpec, info: ModelInfo, base: ModelCard | None) -> ModelInfo:
    """Return `info`, for an adapter completed with what its base provides.

    Raises:
        InvalidModel: Rule 1 does not hold.
        CheckpointInvalid: Rule 3 does not hold.
    """
    if base is None:
        if info.adapter is not None:
            hint = f"; it was made for {info.adapter.made_for}" if info.adapter.made_for else ""
            raise InvalidModel(
                f"{spec.public_source} is a LoRA adapter: register it with the model it is for (thaw models add {spec.name} … --base MODEL){hint}",
                param="base",
            )
        return info
    adapter = info.adapter
    if adapter is None:
        raise InvalidModel(
            f"{spec.public_source} is a whole model and no LoRA adapter; register {spec.name} without a base", param="base"
        )
    if base.spec.engine == "vllm":
        _check_rank(spec, adapter, base.spec)
    for shape in adapter.modules if base.info.modules else ():
        _check(spec, shape, base, adapter.made_for)
    return _copy_from_base(info, base.info)


def _check_vllm(spec: ModelSpec, base: ModelSpec) -> None:
    """Raise if the base's vLLM would be started without LoRA, or cannot read an adapter's files."""
    if base.container is not None:
        raise InvalidRequest(
            f"{spec.name} is for {base.name}, whose engine runs in a container and cannot read adapters; run vLLM as a process",
            param="base",
        )
    if not base.engine_args.get("enable_lora"):
        raise InvalidRequest(
            f"{spec.name} is for {base.name}, whose vLLM serves no adapters. Set engine_args: {{enable_lora: true}} of {base.name}, "
            "or --engine-arg enable_lora=true (and max_lora_rank, max_loras, max_cpu_loras as needed)",
            param="base",
        )


def _check_rank(spec: ModelSpec, adapter: AdapterInfo, base: ModelSpec) -> None:
    rank, limit = max(adapter.rank, *adapter.rank_pattern.values(), 0), int(base.engine_args.get("max_lora_rank", VLLM_RANK))
    if rank <= limit:
        return
    enough = next((r for r in VLLM_RANKS if r >= rank), None)
    remedy = f"set engine_args.max_lora_rank of {base.name} to {enough}" if enough else "vLLM serves no adapter of that rank"
    raise InvalidRequest(f"{spec.name} has rank {rank}, and {base.name} allows {limit}: {remedy}", param="base")


def _copy_from_base(info: ModelInfo, base: ModelInfo) -> ModelInfo:
    names = ("architecture", "model_type", "task", "context_length", "kv_bytes_per_token", "has_chat_template")
    return info.model_copy(update={name: getattr(base, name) for name in names})


def same_content(info: ModelInfo, known: ModelInfo) -> bool:
    """True if files that were read again match `known`, apart from what a base provides."""
    return info == known or (info.adapter is not None and _copy_from_base(info, known) == known)


def _check(spec: ModelSpec, wanted: LinearShape, base: ModelCard, made_for: str) -> None:
    made = f" It was made for {made_for}." if made_for else ""
    same = [m for m in base.info.modules if _is_same_matrix(m.name, wanted.name)]
    if not same:
        last = sorted({m.name.rsplit(".", 1)[-1] for m in base.info.modules if m.name.count("*")})
        raise CheckpointInvalid(
            f"{spec.name} adds to {wanted.name}, which {base.name} does not have (its layers have {', '.join(last[:_SHOWN])}).{made}",
            param="base",
        )
    fits = [m for m in same if (m.rows, m.columns) == (wanted.rows, wanted.columns)]
    if not fits:
        has = " and ".join(f"[{m.rows}, {m.columns}]" for m in same[:2])
        raise CheckpointInvalid(
            f"{spec.name} adds [{wanted.rows}, {wanted.columns}] to {wanted.name}, and {base.name} has {has} there.{made}",
            param="base",
        )
    if (count := sum(m.count for m in fits)) < wanted.count:
        raise CheckpointInvalid(
            f"{spec.name} adds to {wanted.name} in {wanted.count} layers, and {base.name} has {count}.{made}", param="base"
        )


def _is_same_matrix(base: str, adapter: str) -> bool:
    """True if two matrix names match; checkpoints may omit or add a prefix before the layers."""
    return base == adapter or adapter.endswith(f".{base}") or base.endswith(f".{adapter}")


def check_removal(name: str, adapters: Iterable[str], *, with_adapters: bool) -> None:
    """Raise if the model has adapters and the command does not include them."""
    left = sorted(adapters)
    if left and not with_adapters:
        raise Conflict(
            f"{name} has the adapters {', '.join(left)}; remove them first, or all together: thaw models rm {name} --with-adapters"
        )


def resolve_infos(cards: Mapping[str, ModelCard], fresh: Iterable[str]) -> list[ModelCard]:
    """Return the `fresh` cards and the cards of their adapters, completed from the new bases.

    Raises:
        ThawError: An adapter does not fit its base.
    """
    names = set(fresh)
    found = []
    for card in cards.values():
        base = base_of(card.spec, cards)
        if card.name in names or (base is not None and base.name in names):
            info = resolve_info(card.spec, card.info, base)
            if card.name in names or info != card.info:
                found.append(card.model_copy(update={"info": info}))
    return found
