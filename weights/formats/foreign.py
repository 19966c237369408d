"""Describe models that an engine other than the builtin one loads by itself.

The models may have any format; the description is a `ModelInfo`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shared.contracts.model_info import LayerSizes, ModelInfo
from shared.contracts.models import ENGINE_SOURCE, ModelSpec
from shared.errors import CheckpointInvalid
from shared.model_paths import resolve_model, shards_of
from weights.formats.checkpoint import INDEX, parse_index, parse_json, read_small
from weights.formats.gguf import Gguf, read_gguf
from weights.formats.root import expand_user, mode_of
from weights.formats.tokenizer import special_token_ids

CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.engine")
"""Engines read files of one kind, the first that is there."""
_OF_TRAINING = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state.*)\.(bin|pt)")
_KV_ITEM_BYTES = 2
_GGUF_ENCODERS = ("bert", "nomic-bert", "jina-bert-v2")
_UNKNOWN_CONTEXT = 4096


def describe_foreign(spec: ModelSpec) -> ModelInfo | None:
    """Describe a model on this host; None for a source that must be fetched (the hub).

    Such a source is described as the builtin engine's.

    Raises:
        CheckpointInvalid: A file is invalid.
    """
    if spec.source.startswith(ENGINE_SOURCE):
        return _describe_unread(spec)
    if "://" in spec.source:
        return None
    path = expand_user(spec.source)
    if mode_of(path) is None:
        raise CheckpointInvalid(f"{path} does not exist on this node; copy the model there or correct its source")
    try:
        return _describe_local(spec, resolve_model(path))
    except OSError as e:
        raise CheckpointInvalid(
            f"{e.filename or path} cannot be read: {e.strerror}; copy the whole model directory, or check its permissions and the disk"
        ) from e


def _describe_local(spec: ModelSpec, path: Path) -> ModelInfo:
    """Describe a model of files. Raises `OSError` if one cannot be read."""
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if files and (spec.engine == "llamacpp" or not (path / CONFIG).exists()):
        return _from_gguf(path, shards_of(files[0]))
    if (path / CONFIG).is_file():
        return _from_config(path, divided=spec.stages > 1)
    raise CheckpointInvalid(f"{path} holds neither a .gguf file nor a config.json; source is a .gguf file or the model's directory")


def _describe_unread(spec: ModelSpec) -> ModelInfo:
    """Describe a model by its spec only; its name stands for its content."""
    return ModelInfo(
        source=spec.source,
        revision=hashlib.sha256(spec.source.encode()).hexdigest(),
        architecture="unknown",
        model_type="unknown",
        task="embed" if spec.engine_args.get("task") == "embed" else "generate",
        weights_bytes=0,
        parameters=0,
        dtype="auto",
        context_length=spec.max_model_len or _UNKNOWN_CONTEXT,
        kv_bytes_per_token=0,
        has_chat_template=True,
    )


def _from_gguf(path: Path, files: list[Path]) -> ModelInfo:
    """Describe a GGUF model.

    The first shard has the metadata; the bytes are those of all files.
    """
    found = [read_gguf(file) for file in files]
    first = found[0]
    kind = str(first.metadata.get("general.architecture", ""))
    if not kind:
        raise CheckpointInvalid(f"{files[0]} does not say its architecture (general.architecture)")

    def number(name: str, default: int = 0) -> int:
        value = first.metadata.get(f"{kind}.{name}", default)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default

    def list_heads(name: str) -> tuple[int, ...] | None:
        """Return the heads of each layer, of models whose layers differ."""
        value = first.metadata.get(f"{kind}.attention.{name}")
        return tuple(max(0, v) for v in value) if isinstance(value, tuple) else None

    layers, listed, kv_listed = number("block_count"), list_heads("head_count"), list_heads("head_count_kv")
    heads = max(listed, default=0) if listed is not None else number("attention.head_count")
    kv_heads = layers * number("attention.head_count_kv", heads)
    if kv_listed is not None:
        kv_heads = sum(kv_listed)
    elif listed is not None and f"{kind}.attention.head_count_kv" not in first.metadata:
        kv_heads = sum(listed)
    width = number("embedding_length")
    key = number("attention.key_length", width // heads if heads else 0)
    value = number("attention.value_length", key)
    task: Literal["generate", "embed"] = "embed" if kind in _GGUF_ENCODERS else "generate"
    per_token = kv_heads * (key + value) * _KV_ITEM_BYTES
    return ModelInfo(
        source=str(path),
        revision=_revision(files),
        architecture=kind,
        model_type=kind,
        task=task,
        weights_bytes=sum(g.size for g in found),
        parameters=sum(g.parameters for g in found),
        dtype=_dtype(first),
        context_length=number("context_length") or _UNKNOWN_CONTEXT,
        kv_bytes_per_token=0 if task == "embed" else per_token,
        has_chat_template="tokenizer.chat_template" in first.metadata,
        files=len(files),
    )


def _from_config(path: Path, *, divided: bool) -> ModelInfo:
    """Describe a directory in Hugging Face layout that the builtin engine cannot load.

    The model is quantised, or the builtin engine does not know its architecture. With `divided` the
    sizes of its layers are estimated, as equal parts of the files.
    """
    whole = parse_json(read_small(path / CONFIG), str(path / CONFIG))
    inner = whole.get("text_config")
    config: Mapping[str, Any] = {**whole, **inner} if isinstance(inner, dict) else whole

    def number(*names: str) -> int:
        found = (config.get(n) for n in names)
        return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)

    files = _weight_files(path)
    if not files:
        raise CheckpointInvalid(f"{path} has no weights ({', '.join(_WEIGHTS)})")
    heads = number("num_attention_heads", "n_head")
    width = number("hidden_size", "n_embd", "d_model")
    head = number("head_dim") or (width // heads if heads else 0)
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    names = whole.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "unknown"
    embeds = (path / "modules.json").exists()
    nbytes = sum(f.stat().st_size for f in files)
    parts = (
        LayerSizes(count=layers, embedding_bytes=0, layer_bytes=-(-nbytes // layers), head_bytes=0) if divided and layers else None
    )
    return ModelInfo(
        source=str(path),
        revision=_revision([path / CONFIG, *files]),
        architecture=name,
        model_type=str(whole.get("model_type", "unknown")),
        task="embed" if embeds else "generate",
        weights_bytes=nbytes,
        layers=parts,
        parameters=0,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "auto"),
        context_length=number("max_position_embeddings", "n_positions", "n_ctx") or _UNKNOWN_CONTEXT,
        kv_bytes_per_token=0 if embeds else layers * (number("num_key_value_heads") or heads) * head * 2 * _KV_ITEM_BYTES,
        has_chat_template=(path / "chat_template.jinja").exists() or "chat_template" in _tokenizer_settings(path),
        files=len(files),
        special_token_ids=special_token_ids(path, {f.name for f in path.iterdir()}),
    )


def _weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights, each weight once.

    Repositories often have several formats beside each other, and checkpoints of trainings have
    files of their own.
    """
    kinds = ([f for f in path.glob(pattern) if not _OF_TRAINING.fullmatch(f.name)] for pattern in _WEIGHTS)
    files = sorted(next(filter(None, kinds), []))
    index = path / INDEX
    if files and files[0].suffix == ".safetensors" and index.is_file():
        named = set(parse_index(read_small(index), str(index)).values())
        return [f for f in files if f.name in named] or files
    return files


def _tokenizer_settings(path: Path) -> Mapping[str, Any]:
    file = path / "tokenizer_config.json"
    return parse_json(read_small(file), str(file)) if file.is_file() else {}


def _revision(files: list[Path]) -> str:
    """Digest every file's name, size and mtime. The weights are not read."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _dtype(found: Gguf) -> str:
    """Return the most frequent type of the tensors; quantised types have no torch name."""
    names = {0: "float32", 1: "float16", 30: "bfloat16"}
    common = max(set(found.tensor_types), key=found.tensor_types.count, default=-1)
    return names.get(common, f"ggml-{common}")
