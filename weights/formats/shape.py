"""The shape of a model: everything that an initialised engine depends on except weight values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from weights.formats.safetensors import TensorEntry

_WITHOUT_EFFECT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of config.json that change no computation. All others count, known or not."""
_DIGEST_BYTES = 16


def shape_of(config: Mapping[str, Any], tensors: Iterable[TensorEntry]) -> str:
    """Return the digest of a model's shape.

    Models with equal digests have the same architecture, sizes, vocabulary size, types and
    quantisation, and the same tensors. The order of keys and tensors has no effect.

    Args:
        config: The content of config.json.
        tensors: All tensors of the checkpoint.
    """
    kept = {k: v for k, v in config.items() if k not in _WITHOUT_EFFECT}
    listed = sorted((t.name, t.dtype, list(t.shape)) for t in tensors)
    text = json.dumps([kept, listed], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()
