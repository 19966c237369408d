"""Encoding of large JSON responses in time slices, so that they do not delay other clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from services.gateway.http.parsing.cooperative import TimeSlice
from shared.compact_json import encode_json


async def encode_in_slices(data: Mapping[str, Any]) -> bytes:
    """Encode an object as `encode_json`, each element of its lists by itself.

    Values may also be iterators, whose elements are made one at a time.
    """
    time_slice, parts = TimeSlice(), [b"{"]
    for i, (name, value) in enumerate(data.items()):
        parts += [b"," if i else b"", encode_json(name), b":"]
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            parts.append(encode_json(value))
            continue
        parts.append(b"[")
        for j, element in enumerate(value):
            parts += [b"," if j else b"", encode_json(element)]
            await time_slice.pause()
        parts.append(b"]")
    parts.append(b"}")
    return b"".join(parts)
