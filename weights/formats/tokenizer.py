"""Special tokens from a tokenizer's files, without a tokenizer library."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from weights.formats.checkpoint import parse_json, read_small

CONFIG = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
_MAX_BYTES = 256 * 1024 * 1024
"""Limit of a tokenizer.json: vocabularies of a quarter of a million tokens take 33 MB."""

_MAX_DIGITS = 18


def special_token_ids(directory: Path, present: Collection[str]) -> tuple[int, ...]:
    """Return the ids that `skip_special_tokens` removes from a text, in order.

    There are none if no file lists them.

    Args:
        present: Names of the model's files.

    Raises:
        CheckpointInvalid: A file cannot be read.
    """
    return tuple(
        sorted({i for i, token in _iter_added(directory, present) if isinstance(token, dict) and token.get("special") is True})
    )


def _iter_added(directory: Path, present: Collection[str]) -> Iterator[tuple[int, Any]]:
    if CONFIG in present and isinstance(named := _read(directory / CONFIG).get("added_tokens_decoder"), dict):
        yield from ((int(i), token) for i, token in named.items() if i.isdecimal() and len(i) <= _MAX_DIGITS)
    elif TOKENIZER in present and isinstance(listed := _read(directory / TOKENIZER).get("added_tokens"), list):
        yield from ((t["id"], t) for t in listed if isinstance(t, dict) and isinstance(t.get("id"), int))


def _read(path: Path) -> dict[str, Any]:
    return parse_json(read_small(path, _MAX_BYTES), str(path))
