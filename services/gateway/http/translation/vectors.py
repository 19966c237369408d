"""Vectors of an embedding model, as its response has them: base64 of float32, or numbers."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from operator import mul

_FLOAT_BYTES = 4


def vector_of(embedding: str | Sequence[float]) -> Sequence[float]:
    """Decode the `embedding` of a response; an engine may answer with numbers all the same."""
    if not isinstance(embedding, str):
        return embedding
    raw = base64.b64decode(embedding)
    vector = array("f")
    assert vector.itemsize == _FLOAT_BYTES
    vector.frombytes(raw)
    return vector


def normalize(vector: Sequence[float]) -> list[float]:
    """Scale a vector to length 1; a vector of zeros stays one."""
    length = math.sqrt(_dot(vector, vector))
    return [x / length for x in vector] if length else list(vector)


def cosine_similarity(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors, from -1 to 1; 0 if one has no length.

    Raises:
        ValueError: Their dimensions differ.
    """
    if len(a) != len(b):
        raise ValueError(f"vectors of {len(a)} and {len(b)} dimensions")
    lengths = math.sqrt(_dot(a, a) * _dot(b, b))
    return max(-1.0, min(1.0, _dot(a, b) / lengths)) if lengths else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(map(mul, a, b))
