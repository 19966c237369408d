"""Make `ModelInfo` from a model's small files and the headers of its weights.

The module needs neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from shared.contracts.model_info import ModelInfo
from shared.contracts.stages import RankOf
from shared.dtypes import DTYPE_BITS
from shared.errors import CheckpointInvalid, InvalidModel
from weights.formats.architectures import Architecture, read_architecture
from weights.formats.checkpoint import TOKENIZERS, Checkpoint, parse_json, read_small
from weights.formats.lora_adapter import CONFIG as ADAPTER_CONFIG
from weights.formats.lora_adapter import check_adapter_config, describe_adapter, is_adapter, linear_shapes
from weights.formats.page_groups import whole_page_bytes
from weights.formats.ranks import file_of_rank, rows_of_rank
from weights.formats.root import check_inside
from weights.formats.segment import lay_out
from weights.formats.shape import shape_of
from weights.formats.stages import layer_sizes
from weights.formats.tokenizer import special_token_ids

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
POOLING = "modules.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_SMALL = frozenset({CONFIG, TOKENIZER_CONFIG, POOLING, ADAPTER_CONFIG, *TEMPLATES, "generation_config.json"}.union(*TOKENIZERS))
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check_small_files(directory: Path, present: Collection[str], *, trust_remote_code: bool) -> tuple[Architecture, bytes]:
    """Return the architecture in config.json, and its bytes.

    The tokenizer must be present. Raises `CheckpointInvalid`, `UnsupportedArchitecture` or
    `InvalidModel`.

    Args:
        present: Names of the model's files.
    """
    for name in _SMALL & set(present):
        check_inside(directory, directory / name)
    if is_adapter(present):
        return Architecture("LoRA", "lora", "generate", 1, 0), check_adapter_config(directory, present)
    path = directory / CONFIG
    config = read_small(path)
    architecture = read_architecture(
        parse_json(config, str(path)), str(path), embeds=POOLING in present, trust_remote_code=trust_remote_code
    )
    if not any(files <= set(present) for files in TOKENIZERS):
        known = "; ".join(" and ".join(sorted(files)) for files in TOKENIZERS)
        raise CheckpointInvalid(f"{directory} has no tokenizer (one of {known}); copy it from the weights' source")
    tokenizer = directory / TOKENIZER_CONFIG
    if TOKENIZER_CONFIG in present and not trust_remote_code and "auto_map" in parse_json(read_small(tokenizer), str(tokenizer)):
        raise InvalidModel(
            f"{tokenizer} wants to run the model's own Python code (auto_map); if you trust its author, register the "
            "model with trust_remote_code: true"
        )
    return architecture, config


def describe(
    source: str, revision: str, architecture: Architecture, checkpoint: Checkpoint, directory: Path, present: Collection[str]
) -> ModelInfo:
    """Describe a model.

    Returns:
        The description. Its `weights_bytes` is the shared memory that the segment will take, to the
        byte.

    Raises:
        CheckpointInvalid: A file is damaged or missing.
        InvalidModel: The engine cannot run it.
    """
    if is_adapter(present):
        return describe_adapter(source, revision, checkpoint, directory)
    by_dtype: Counter[str] = Counter()
    parameters = 0
    whole = checkpoint
    if checkpoint.ranks > 1:
        checkpoint = file_of_rank(checkpoint, RankOf(index=0, count=checkpoint.ranks))
    for file in checkpoint.files:
        # Tied tensors are one: they have the same bytes.
        for tensor in {(t.offset, t.nbytes): t for t in file.header.tensors}.values():
            by_dtype[tensor.dtype] += tensor.nbytes
            parameters += math.prod(tensor.shape) * (whole.ranks if tensor.cut is not None else 1)
    dtype = by_dtype.most_common(1)[0][0]
    if dtype not in DTYPES:
        raise InvalidModel(
            f"{source}: most weights are {dtype}; the builtin engine runs {', '.join(DTYPES.values())}: take the unquantised model"
        )
    layout = lay_out(whole, revision)
    config = parse_json(read_small(directory / CONFIG), str(directory / CONFIG))
    tensors = [t for f in checkpoint.files for t in f.header.tensors]
    divided = rows_of_rank(tensors, config, RankOf(index=0, count=2))
    divided_bytes = sum(t.nbytes for t in tensors if t.name in divided) if whole.ranks == 1 else layout.total_bytes
    return ModelInfo(
        source=source,
        revision=revision,
        architecture=architecture.name,
        model_type=architecture.model_type,
        task=architecture.task,
        weights_bytes=layout.total_bytes,
        page_bytes=whole_page_bytes(layout.tensors),
        parameters=parameters,
        dtype=DTYPES[dtype],
        context_length=architecture.context_length,
        kv_bytes_per_token=architecture.kv_elements_per_token * DTYPE_BITS[dtype] // 8,
        has_chat_template=_has_template(directory, present),
        files=len(checkpoint.files),
        shape=shape_of(config, tensors),
        layers=layer_sizes(tensors, len(layout.head)),
        divided_bytes=divided_bytes,
        ranks=whole.ranks,
        modules=linear_shapes(checkpoint),
        vocab_size=architecture.vocab_size,
        special_token_ids=special_token_ids(directory, present),
    )


def _has_template(directory: Path, present: Collection[str]) -> bool:
    if any(name in present for name in TEMPLATES):
        return True
    if TOKENIZER_CONFIG not in present:
        return False
    path = directory / TOKENIZER_CONFIG
    return bool(parse_json(read_small(path), str(path)).get("chat_template"))
