"""Metadata and tensor list of a GGUF file.

Every read is bounded, since the file is not trusted.

Layout: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. Weights are not
read.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shared.errors import CheckpointInvalid

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 65_536
_MAX_TENSORS = 1_000_000
_MAX_DIMENSIONS = 8
_MAX_KEY_BYTES = 65_536
_MAX_KEPT_STRING = 1 << 16
_MAX_ARRAY = 16_000_000
_MAX_KEPT_ARRAY = 4096
"""Lists of numbers that have a value for each layer are shorter."""
_MAX_NESTING = 2
_STRING, _ARRAY, _BOOL = 8, 9, 7
_INTEGERS = (0, 1, 2, 3, 4, 5, 10, 11)
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Gguf:
    """The header of a GGUF file.

    Attributes:
        metadata: Scalars, strings and short lists of integers; of other lists only the length.
        parameters: Number of parameters of all tensors.
        tensor_types: ggml's type of each tensor.
        size: Of the file, in bytes.
    """

    metadata: dict[str, Any]
    parameters: int
    tensor_types: tuple[int, ...]
    size: int


class _Reader:
    """Reader that stays within the file's length.

    No count in the file can allocate more memory than the file has bytes.
    """

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file = file
        self._left = size
        self._name = name

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise self.fault("it ends in the middle of its head")
        self._left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise self.fault("it ends in the middle of its head")
        return data

    def skip(self, count: int) -> None:
        if count > self._left:
            raise self.fault("it ends in the middle of its head")
        self._left -= count
        self._file.seek(count, 1)

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise self.fault(f"it has a value of unknown type {kind}")
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}")))[0]

    def count(self, limit: int, what: str) -> int:
        found = int(self.scalar(10))
        if found > limit:
            raise self.fault(f"it claims {found} {what}")
        return found

    def string(self, limit: int, what: str) -> str:
        return self.take(self.count(limit, what)).decode(errors="replace")

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == _STRING:
            length = self.count(self._left, "bytes of text")
            if length > _MAX_KEPT_STRING:  # longer than any chat template: no reader uses it
                self.skip(length)
                return ""
            return self.take(length).decode(errors="replace")
        if kind == _ARRAY:
            return self._array(nesting)
        return self.scalar(kind)

    def _array(self, nesting: int) -> int | tuple[int, ...]:
        kind = int(self.scalar(4))
        count = self.count(_MAX_ARRAY, "entries of a list")
        if nesting >= _MAX_NESTING:
            raise self.fault("its lists are nested too deep")
        if kind in _INTEGERS and count <= _MAX_KEPT_ARRAY:
            layout = f"<{count}{_SCALARS[kind]}"
            return struct.unpack(layout, self.take(struct.calcsize(layout)))
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            for _ in range(count):
                self._skip_string() if kind == _STRING else self.value(kind, nesting + 1)
        return count

    def _skip_string(self) -> None:
        self.skip(self.count(self._left, "bytes of text"))

    def fault(self, what: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"{self._name} is no sound GGUF file: {what}; fetch it again from its source")


def read_gguf(path: Path) -> Gguf:
    """Read the metadata and the tensor list of a file.

    Raises:
        CheckpointInvalid: The file cannot be read, or is not valid GGUF.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _read(_Reader(file, size, str(path)), size)
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}") from e


def _read(reader: _Reader, size: int) -> Gguf:
    if reader.take(4) != MAGIC:
        raise reader.fault("it does not begin with GGUF")
    version = int(reader.scalar(4))
    if version not in _VERSIONS:
        raise reader.fault(f"it has version {version}; known are {', '.join(map(str, _VERSIONS))}")
    tensors = reader.count(_MAX_TENSORS, "tensors")
    entries = reader.count(_MAX_ENTRIES, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = reader.string(_MAX_KEY_BYTES, "bytes of a key")
        metadata[key] = reader.value(int(reader.scalar(4)))
    parameters, types = 0, []
    for _ in range(tensors):
        reader.string(_MAX_KEY_BYTES, "bytes of a name")
        dimensions = int(reader.scalar(4))
        if dimensions > _MAX_DIMENSIONS:
            raise reader.fault(f"a tensor has {dimensions} dimensions")
        shape = [int(reader.scalar(10)) for _ in range(dimensions)]
        types.append(int(reader.scalar(4)))
        reader.scalar(10)  # its offset
        # A weight takes at least a sixteenth of a byte: a larger count is invalid.
        parameters += math.prod(shape)
        if parameters > 16 * size:
            raise reader.fault("its tensors are larger than the file")
    return Gguf(metadata, parameters, tuple(types), size)
