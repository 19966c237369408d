"""Read weights to be converted, from any format, tensor by tensor.

Shards are read one by one, so that memory does not grow with the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Protocol

from shared.errors import CheckpointInvalid
from weights.convert.pickled import TORCH_INDEX, TorchShard, torch_names
from weights.convert.tensor import PIECE_BYTES, SourceTensor
from weights.formats.checkpoint import (
    INDEX,
    TORCH_SUFFIXES,
    Checkpoint,
    WeightFile,
    open_checkpoint,
    open_path,
    parse_index,
    read_small,
)
from weights.formats.converted import INDEX_NAME
from weights.formats.root import check_inside, mode_of


class Shard(Protocol):
    """One file of the source."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def tensors(self) -> AbstractContextManager[Sequence[SourceTensor]]:
        """Return the file's tensors, readable in the block. Raises `CheckpointInvalid`."""
        ...


@dataclass(frozen=True)
class Source:
    """Weights to be converted.

    Attributes:
        root: Directory of the model's other files; None for a single file.
        weight_map: Maps tensors to files; None without an index.
    """

    shards: tuple[Shard, ...]
    root: Path | None
    weight_map: dict[str, str] | None = None

    @property
    def size(self) -> int:
        return sum(s.size for s in self.shards)


def open_source(path: Path) -> Source:
    """Open `path`: a model or adapter directory, or one file.

    Raises `CheckpointInvalid`.
    """
    mode = mode_of(path)
    if mode is None:
        raise CheckpointInvalid(f"{path} does not exist; name a model directory, or a .safetensors, .bin or .pt file")
    if not S_ISDIR(mode):
        if path.name.endswith(TORCH_SUFFIXES):
            return Source((_torch_shard(path),), None)
        return Source(_safetensors_shards(open_path(path)), None)
    present = _list_names(path)
    if INDEX_NAME in present:
        raise CheckpointInvalid(f"{path} is converted already ({INDEX_NAME}); name the original")
    if any(n.endswith(".safetensors") for n in present) or INDEX in present:
        return Source(_safetensors_shards(open_checkpoint(path)), path)
    names = torch_names(present)
    if names is None:
        if not any(n.endswith(TORCH_SUFFIXES) for n in present):
            open_checkpoint(path)  # says what is missing
        raise CheckpointInvalid(
            f"{path} has several PyTorch files and no {TORCH_INDEX}; copy the index from their source, or name one file"
        )
    weight_map = None
    if TORCH_INDEX in names:
        check_inside(path, path / TORCH_INDEX)
        weight_map = parse_index(read_small(path / TORCH_INDEX), str(path / TORCH_INDEX), TORCH_SUFFIXES)
        names = tuple(sorted(set(weight_map.values())))
    for name in names:
        check_inside(path, path / name)
    return Source(tuple(_torch_shard(path / name) for name in names), path, weight_map)


def _list_names(directory: Path) -> set[str]:
    try:
        return {p.name for p in directory.iterdir()}
    except OSError as e:
        raise CheckpointInvalid(f"{directory} cannot be listed: {e.strerror}; check its permissions") from e


def _torch_shard(path: Path) -> TorchShard:
    try:
        stat = path.stat()
    except FileNotFoundError as e:
        raise CheckpointInvalid(f"{path} is missing; download it again, or copy the whole model directory") from e
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
    if not S_ISREG(stat.st_mode):
        raise CheckpointInvalid(f"{path} cannot be read: it is not a regular file; copy the whole model directory")
    return TorchShard(path, stat.st_size)


def _safetensors_shards(checkpoint: Checkpoint) -> tuple[Shard, ...]:
    return tuple(_SafetensorsShard(f) for f in checkpoint.files)


@dataclass(frozen=True)
class _SafetensorsShard:
    file: WeightFile

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def size(self) -> int:
        return self.file.size

    @contextmanager
    def tensors(self) -> Iterator[Sequence[SourceTensor]]:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointInvalid(f"{self.path} cannot be read: {e.strerror}; check its permissions and the disk") from e
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._check(fd)
            yield [
                SourceTensor(t.name, t.dtype, t.shape, t.nbytes, _Range(self.path, fd, t.offset, buffer).view)
                for t in self.file.header.tensors
            ]
            self._check(fd)
        finally:
            os.close(fd)

    def _check(self, fd: int) -> None:
        stat = os.fstat(fd)
        if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (self.file.size, *self.file.stamp):
            raise CheckpointInvalid(f"{self.path} changed while it was read; wait until it is written, then convert again")


@dataclass(frozen=True)
class _Range:
    path: Path
    fd: int
    start: int
    buffer: memoryview

    def view(self, offset: int, length: int) -> memoryview:
        into = self.buffer[:length] if length <= len(self.buffer) else memoryview(bytearray(length))
        done = 0
        while done < length:
            try:
                got = os.preadv(self.fd, [into[done:]], self.start + offset + done)
            except OSError as e:
                raise CheckpointInvalid(f"{self.path} cannot be read: {e.strerror}; check the disk") from e
            if got == 0:
                raise CheckpointInvalid(f"{self.path} shrank while it was read; wait until it is written, then convert again")
            done += got
        return into
