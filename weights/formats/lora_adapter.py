"""Read PEFT's LoRA adapters, and check whether they can be served.

The sources are adapter_config.json and the headers of the weights. A directory is a LoRA adapter if
it has adapter_config.json and no weights of a whole model. Its tensors are named
`base_model.model.MODULE.lora_A.weight` (rank by inputs) and `….lora_B.weight` (outputs by rank).
services/scheduler/domain/admin/lora_adapters.py and the engine check whether the adapter fits its
base, because they know both.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shared.contracts.model_info import AdapterInfo, LinearShape, ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel
from weights.formats.checkpoint import INDEX, SINGLE, Checkpoint, parse_json, read_small
from weights.formats.safetensors import TensorEntry
from weights.formats.segment import lay_out

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>[^\s]+)\.lora_(?P<part>[AB])\.weight")
_PLAIN = re.compile(r"[\w.]{1,64}")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of initialising that also change the base's weights; PEFT can save such an adapter as an
ordinary one.
"""
_REFUSED = {
    "use_dora": "DoRA scales the base's weights, which adapters share here; merge it into the base",
    "use_qalora": "QALoRA belongs to quantised bases",
    "lora_bias": "biases of the adapter's own are not supported",
    "modules_to_save": "it replaces whole modules of the base, which adapters share here; merge it into the base",
    "trainable_token_indices": "it changes the base's embeddings, which adapters share here; merge it into the base",
    "target_parameters": "adapters of parameters that are no linear layers are not supported",
    "layer_replication": "it makes the base another model; merge it into the base",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "routing among adapters is not supported",
    "megatron_config": "Megatron's layers are not supported",
}
"""Settings of an adapter's that would change the output and cannot be honoured, with the remedy."""
_SHOWN = 3
_PATTERNS = 256
_MAX_NUMBER = 1 << 31


def is_adapter(present: Collection[str]) -> bool:
    """True if the files named `present` are an adapter's."""
    return CONFIG in present and not {SINGLE, INDEX} & set(present)


def check_adapter_config(directory: Path, present: Collection[str]) -> bytes:
    """adapter_config.json, if it is that of an adapter that can be served.

    Raises `CheckpointInvalid` or `InvalidModel`.
    """
    config = read_small(directory / CONFIG)
    _read_config(parse_json(config, str(directory / CONFIG)), str(directory / CONFIG))
    if "adapter_model.bin" in present and not any(n.endswith(".safetensors") for n in present):
        raise CheckpointInvalid(
            f"{directory} has its weights as PyTorch's adapter_model.bin only; make it safe to load: thaw convert {directory} DST"
        )
    return config


def describe_adapter(source: str, revision: str, checkpoint: Checkpoint, directory: Path) -> ModelInfo:
    """Describe a LoRA adapter.

    Returns:
        The description. Its `weights_bytes` is the shared memory that the segment will take.

    Raises:
        CheckpointInvalid: A file is damaged or missing.
        InvalidModel: The engine cannot run it.
    """
    path = directory / CONFIG
    raw = parse_json(read_small(path), str(path))
    info = _read_config(raw, str(path))
    tensors = [t for file in checkpoint.files for t in file.header.tensors]
    pairs = _pairs(tensors, source)
    _check_pairs(pairs, info, raw, source)
    dtypes = {t.dtype for t in tensors}
    if unknown := dtypes - _DTYPES.keys():
        raise InvalidModel(f"{source}: weights of type {', '.join(sorted(unknown))}; adapters are {', '.join(_DTYPES.values())}")
    return ModelInfo(
        source=source,
        revision=revision,
        architecture="LoRA",
        model_type="lora",
        task="generate",
        weights_bytes=lay_out(checkpoint, revision).total_bytes,
        parameters=sum(math.prod(t.shape) for t in tensors),
        dtype=_DTYPES[Counter(t.dtype for t in tensors).most_common(1)[0][0]],
        context_length=1,
        kv_bytes_per_token=0,
        files=len(checkpoint.files),
        adapter=info.model_copy(update={"modules": _shapes(pairs, transposed=bool(raw.get("fan_in_fan_out")))}),
    )


def linear_shapes(checkpoint: Checkpoint) -> tuple[LinearShape, ...]:
    """The weight matrices of a model, those of all layers together."""
    matrices = (
        (t.name.removesuffix(".weight"), t.shape[0], t.shape[1])
        for file in checkpoint.files
        for t in file.header.tensors
        if len(t.shape) == 2 and t.name.endswith(".weight")
    )
    return _group_shapes(matrices)


def _group_shapes(matrices: Iterable[tuple[str, int, int]]) -> tuple[LinearShape, ...]:
    counted = Counter((re.sub(r"(?<=\.)\d+(?=\.)", "*", f".{name}.")[1:-1], rows, columns) for name, rows, columns in matrices)
    return tuple(LinearShape(name=n, rows=r, columns=c, count=k) for (n, r, c), k in sorted(counted.items()))


def _read_config(raw: Mapping[str, Any], where: str) -> AdapterInfo:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise InvalidModel(f"{where}: adapters of type {kind} are not supported; LORA is")
    for key, why in _REFUSED.items():
        if raw.get(key):
            raise InvalidModel(f"{where}: {key} is set: {why}")
    if raw.get("bias", "none") != "none":
        raise InvalidModel(f"{where}: bias is {raw['bias']!r}: it changes the base's biases, which adapters share here; merge it")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise InvalidModel(f"{where}: task_type is {raw['task_type']!r}; adapters of text generation (CAUSAL_LM) are served")
    if str(raw.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise InvalidModel(
            f"{where}: init_lora_weights is {raw['init_lora_weights']!r}, which changes the base's weights as well; save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion, or merge it"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if rank is None or alpha is None or not _number(rank, whole=True) or not _number(alpha):
        raise CheckpointInvalid(f"{where}: r is {rank!r} and lora_alpha {alpha!r}; both must be positive numbers")
    return AdapterInfo(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(raw.get("use_rslora")),
        rank_pattern=_pattern(raw, "rank_pattern", where, whole=True),
        alpha_pattern=_pattern(raw, "alpha_pattern", where),
        made_for=str(raw.get("base_model_name_or_path") or "")[:300],
    )


def _number(value: Any, *, whole: bool = False) -> bool:
    kinds = (int,) if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER


def _pattern(raw: Mapping[str, Any], key: str, where: str, *, whole: bool = False) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict) or not all(_number(v, whole=whole) for v in found.values()):
        raise CheckpointInvalid(f"{where}: {key} must map names of modules to positive numbers")
    if len(found) > _PATTERNS:
        raise InvalidModel(f"{where}: {key} has {len(found)} entries; at most {_PATTERNS} are supported")
    # PEFT takes them for regular expressions, which can be written to run for ever.
    if strange := [name for name in found if not _PLAIN.fullmatch(name)]:
        raise InvalidModel(f"{where}: {key} has {strange[0]!r}; only names of modules, or ends of them, are supported there")
    return found


def _pairs(tensors: Iterable[TensorEntry], source: str) -> dict[str, dict[str, TensorEntry]]:
    """By module: its `A` and `B`."""
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for tensor in tensors:
        found = _TENSOR.fullmatch(tensor.name)
        if found is None and tensor.name.endswith(".base_layer.weight"):  # PEFT adds the base's own head to an adapter of the head
            raise InvalidModel(
                f"{source}: tensor {tensor.name!r} is a layer of the base; save the adapter without it: "
                "save_pretrained(DIRECTORY, save_embedding_layers=False)"
            )
        if found is None:
            raise InvalidModel(
                f"{source}: tensor {tensor.name!r} is not one of a linear layer's LoRA pair (….lora_A.weight, ….lora_B.weight); embeddings, "
                "DoRA and saved modules are not supported"
            )
        pairs.setdefault(found["module"].removeprefix(_PREFIX), {})[found["part"]] = tensor
    return pairs


def _check_pairs(pairs: Mapping[str, Mapping[str, TensorEntry]], info: AdapterInfo, raw: Mapping[str, Any], source: str) -> None:
    targets = raw.get("target_modules")
    for module, pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise CheckpointInvalid(f"{source}: {module} has only one of lora_A and lora_B; download it again")
        a, b, rank = pair["A"].shape, pair["B"].shape, info.rank_of(module)
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise CheckpointInvalid(
                f"{source}: {module} has lora_A {list(a)} and lora_B {list(b)}, and {CONFIG} says that its rank is {rank}: they must be "
                f"[{rank}, inputs] and [outputs, {rank}]"
            )
        if isinstance(targets, list) and not any(module == t or module.endswith(f".{t}") for t in targets if isinstance(t, str)):
            shown = ", ".join(map(str, targets[:_SHOWN]))
            raise CheckpointInvalid(f"{source}: weights of {module}, which is none of target_modules ({shown}, …) in {CONFIG}")


def _shapes(pairs: Mapping[str, Mapping[str, TensorEntry]], *, transposed: bool) -> tuple[LinearShape, ...]:
    """Return the shapes in the layout of the base's weights.

    That is outputs by inputs, or inputs by outputs with `fan_in_fan_out`.
    """
    outer = ((m, p["B"].shape[0], p["A"].shape[1]) for m, p in pairs.items())
    return _group_shapes((m, i, o) if transposed else (m, o, i) for m, o, i in outer)
