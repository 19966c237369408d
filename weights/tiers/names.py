"""Select a model's files at a remote place, and the names that are safe to create."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping

from shared.errors import CheckpointInvalid
from weights.formats import converted
from weights.formats.checkpoint import INDEX, MAX_JSON_BYTES, SINGLE, TOKENIZERS, parse_index, weight_names
from weights.formats.lora_adapter import CONFIG as ADAPTER_CONFIG
from weights.formats.safetensors import is_text

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "1_Pooling/*.json")
CODE_FILES = ("*.py",)
PROBED = (
    "config.json",
    INDEX,
    SINGLE,
    converted.INDEX_NAME,
    ADAPTER_CONFIG,
    "adapter_model.safetensors",
    *sorted(set().union(*TOKENIZERS)),
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "modules.json",
    "1_Pooling/config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
"""Names that the loader tries at a place that cannot list its files."""
_PART = re.compile(r"[^/\\\0]{1,255}")


def is_safe(name: str) -> bool:
    """True if `name` can only be a file below the model's directory.

    It is relative, has no `..`, and hides nothing.
    """
    return (
        is_text(name)
        and all(_PART.fullmatch(part) and not part.startswith(".") for part in name.split("/"))
        and len(name.encode()) < 1024
    )


def is_small(name: str, size: int) -> bool:
    """True if an inspection of the model fetches the file.

    Such files are the configuration, the tokenizer and the model's own code.
    """
    patterns = (*SMALL_FILES, *CODE_FILES)
    return size <= limit_of(name) and any(fnmatch.fnmatchcase(name, p) and name.count("/") == p.count("/") for p in patterns)


def limit_of(name: str) -> int:
    """Bytes that a small file may have: it is read into memory whole."""
    return converted.MAX_INDEX_BYTES if name == converted.INDEX_NAME else MAX_JSON_BYTES


def check_limit(name: str, size: int, where: str) -> None:
    """Raises `CheckpointInvalid` for what is too large to be what it is called."""
    if size > limit_of(name):
        raise CheckpointInvalid(f"{where}/{name} is over {limit_of(name)} bytes; that is no configuration file")


def is_code(name: str) -> bool:
    return name.endswith(".py")


def weights_of(present: Collection[str], where: str, read: Callable[[str], bytes]) -> tuple[str, ...]:
    """Return the names of the weight files among `present`.

    Args:
        read: `read(name)` returns the content of a small file.

    Raises:
        CheckpointInvalid: The files do not fit together.
    """
    if converted.INDEX_NAME in present:
        raw = read(converted.INDEX_NAME)
        return tuple(sorted(p.file for p in converted.parse_index(raw, f"{where}/{converted.INDEX_NAME}").partitions))
    names = weight_names(present, where)
    return names if names is not None else tuple(sorted(set(parse_index(read(INDEX), f"{where}/{INDEX}").values())))


def select(sizes: Mapping[str, int], where: str, read: Callable[[str], bytes]) -> tuple[str, ...]:
    """Names of all of a model's files among those at a place, sorted.

    Raises `CheckpointInvalid` if its weights are not there.
    """
    safe = {name: size for name, size in sizes.items() if is_safe(name)}

    def read_checked(name: str) -> bytes:
        check_limit(name, safe[name], where)
        return read(name)

    weights = weights_of(safe, where, read_checked)
    for name in weights:
        if name not in safe:
            raise CheckpointInvalid(f"{where}/{name} is named by the model's index but missing; the source is incomplete")
    return tuple(sorted({*weights, *(name for name, size in safe.items() if is_small(name, size))}))
