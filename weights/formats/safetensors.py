"""The header of a safetensors file, taken for hostile until proved otherwise.

Format (github.com/huggingface/safetensors): 8 bytes little-endian length N, N bytes of JSON naming
each tensor's dtype, shape and place, then the tensors' bytes without holes. Everything that does
not hold exactly is a `CheckpointInvalid` naming the file: a lying header would have the engine read
other tensors' bytes, or beyond the segment.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from shared.contracts.segment import TensorCut
from shared.dtypes import SAFETENSORS_BITS
from shared.errors import CheckpointInvalid

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 25_000_000
"""The limit of huggingface_hub; the largest real headers are a few MB."""
MAX_NAME = 4096
MAX_DIMENSIONS = 64
"""Beyond what torch computes with. The product of millions of numbers takes hours."""
Read = Callable[[int, int], bytes]
"""`read(offset, length)`: at most `length` bytes of the file from `offset`."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        offset: Bytes from the start of the file; tied tensors have the same.
        sha256: SHA-256 of its bytes in hex; empty except in converted checkpoints.
        cut: The entry is a range of the tensor, for one rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str = ""
    cut: TensorCut | None = None


@dataclass(frozen=True)
class FileHeader:
    """A checked header.

    Attributes:
        raw: Its JSON as stored, for digests.
    """

    tensors: tuple[TensorEntry, ...]
    raw: bytes


def read_header(file: str, size: int, read: Read) -> FileHeader:
    """The header of `file`, which is `size` bytes long. Raises `CheckpointInvalid`."""
    if size < PREFIX_BYTES:
        _raise_invalid(file, f"is {size} bytes long, too short for a safetensors file; download it again")
    length = int.from_bytes(_read_exactly(file, read, 0, PREFIX_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        _raise_invalid(
            file, f"claims a header of {length} bytes (at most {MAX_HEADER_BYTES}); it is damaged or not a safetensors file"
        )
    if PREFIX_BYTES + length > size:
        _raise_invalid(file, f"ends inside its header ({size} of at least {PREFIX_BYTES + length} bytes); download it again")
    raw = _read_exactly(file, read, PREFIX_BYTES, length)
    return FileHeader(_tensors(file, _parse(file, raw), PREFIX_BYTES + length, size), raw)


def _raise_invalid(file: str, what: str) -> NoReturn:
    raise CheckpointInvalid(f"{file} {what}")


def _read_exactly(file: str, read: Read, offset: int, length: int) -> bytes:
    data = read(offset, length)
    if len(data) != length:
        _raise_invalid(file, "shrank while its header was read; download it again")
    return data


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(
            1
        )  # a header may have millions: counting each by itself takes hours
        raise ValueError(f"the name {name!r:.80} occurs twice")
    return found


def _parse(file: str, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_require_unique)
    except (ValueError, RecursionError) as e:  # JSON, UTF-8 and over-long integers are all ValueErrors
        raise CheckpointInvalid(f"{file} has no readable safetensors header ({e}); download it again") from e
    if not isinstance(header, dict):
        _raise_invalid(file, "has a safetensors header that is not an object; download it again")
    header.pop("__metadata__", None)
    return header


def _tensors(file: str, header: dict[str, Any], data_start: int, size: int) -> tuple[TensorEntry, ...]:
    """Return all tensors in the order of their bytes, checked.

    Each is in range, has the size of its shape and dtype, and there is no overlap or hole.
    """
    entries = sorted((_tensor(file, name, value) for name, value in header.items()), key=lambda e: (e.offset, e.nbytes))
    at = 0
    for entry in entries:
        if entry.offset < at:
            _raise_invalid(file, f"has tensor {entry.name!r} overlapping another one; its header is damaged, download it again")
        if entry.offset > at:
            _raise_invalid(
                file, f"leaves bytes {at} to {entry.offset} of its data to no tensor; its header is damaged, download it again"
            )
        at += entry.nbytes
    if data_start + at > size:
        _raise_invalid(file, f"is truncated: {size} bytes, and its header promises {data_start + at}; download it again")
    if data_start + at < size:
        _raise_invalid(file, f"is longer than its header says ({size} bytes instead of {data_start + at}); download it again")
    return tuple(TensorEntry(e.name, e.dtype, e.shape, data_start + e.offset, e.nbytes) for e in entries)


def _tensor(file: str, name: str, value: Any) -> TensorEntry:
    if len(name) > MAX_NAME or not is_text(name):
        _raise_invalid(
            file, f"has a tensor of the name {name!r:.80}, which is over {MAX_NAME} characters long or no text; rename it"
        )
    if not isinstance(value, dict):
        _raise_invalid(file, f"describes tensor {name!r} by something that is not an object")
    dtype, shape, offsets = value.get("dtype"), _naturals(value.get("shape")), _naturals(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_BITS:
        _raise_invalid(
            file, f"gives tensor {name!r} the unknown dtype {dtype!r:.80}; known are {', '.join(sorted(SAFETENSORS_BITS))}"
        )
    if shape is None:
        _raise_invalid(file, f"gives tensor {name!r} a shape that is not a list of natural numbers: {value.get('shape')!r:.80}")
    if offsets is None or len(offsets) != 2 or offsets[1] < offsets[0]:
        _raise_invalid(file, f"places tensor {name!r} at {value.get('data_offsets')!r:.80}, which is not a range of bytes")
    if len(shape) > MAX_DIMENSIONS:
        _raise_invalid(file, f"gives tensor {name!r} {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if is_absurd(shape, SAFETENSORS_BITS[dtype]):
        _raise_invalid(
            file,
            f"gives tensor {name!r} the shape {list(shape)!s:.80}, which nothing can hold; its header is damaged, download it again",
        )
    bits = math.prod(shape) * SAFETENSORS_BITS[dtype]
    begin, end = offsets
    if bits % 8 or bits // 8 != end - begin:
        _raise_invalid(file, f"gives tensor {name!r} {end - begin} bytes, but {dtype} of shape {list(shape)} needs {-(-bits // 8)}")
    return TensorEntry(name, dtype, shape, begin, end - begin)


def is_text(name: str) -> bool:
    """True if the string has no lone surrogates.

    JSON can spell them, but no file system, message or index accepts them.
    """
    return not any("\ud800" <= c <= "\udfff" for c in name)


def is_absurd(shape: tuple[int, ...], bits: int) -> bool:
    """True if torch cannot count the strides and bytes of a tensor of this shape.

    torch counts them as if each dimension had an element.
    """
    return math.prod(max(1, length) for length in shape) * bits >= 1 << 66


def _naturals(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value):
        return tuple(value)
    return None
