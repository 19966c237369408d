"""Convert one checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointInvalid
from weights.convert.companions import copy_companions
from weights.convert.disk import check_room, staged, write_file
from weights.convert.parallel import Plan, plan_for
from weights.convert.source import Shard, Source, open_source
from weights.convert.tensor import SourceTensor, part_shape, pieces
from weights.convert.writer import PartitionWriter
from weights.formats.converted import INDEX_NAME, partition_name, write_index
from weights.formats.safetensors import MAX_DIMENSIONS, MAX_NAME, is_text
from weights.formats.verify import verify

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`, in bytes; `stage` is convert or verify."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        tied: Number of tensors that share the bytes of others.
        bytes: Size of the partitions.
        companions: Number of other files that were copied.
    """

    tensors: int
    tied: int
    bytes: int
    source_bytes: int
    companions: int
    ranks: int
    seconds: float
    verified: bool


def convert(
    source: Path, destination: Path, ranks: int = 1, *, check: bool = False, progress: Progress = lambda stage, done, total: None
) -> Converted:
    """Convert `source` into the new directory `destination`, divided for `ranks`.

    The conversion is atomic: `destination` appears complete and on the disk, or not at all. Its
    memory does not grow with the model.

    Args:
        check: Read back and compare the written bytes.

    Raises:
        CheckpointInvalid: The source is invalid.
        UnsupportedArchitecture: The architecture cannot be divided.
        Unavailable: The disk failed.
        Conflict: The destination exists, or another process is converting to it.
        InsufficientMemory: The memory does not suffice.
    """
    started = time.monotonic()
    found = open_source(source)
    plan = plan_for(found.root, ranks)
    with staged(destination) as draft:
        check_room(destination.parent, found.size)
        job = _Job(found, plan, draft, progress)
        job.write()
        companions = copy_companions(found.root, draft) if found.root is not None else 0
        # Last: without it the directory is no checkpoint.
        write_file(draft / INDEX_NAME, job.index)
        if check:
            verify(draft, on_bytes=job.report_verified)
    return Converted(
        tensors=job.tensors,
        tied=job.tied,
        bytes=job.bytes,
        source_bytes=found.size,
        companions=companions,
        ranks=ranks,
        seconds=time.monotonic() - started,
        verified=check,
    )


class _Job:
    """The conversion of the weights."""

    def __init__(self, source: Source, plan: Plan, draft: Path, progress: Progress) -> None:
        self._source, self._plan, self._draft, self._progress = source, plan, draft, progress
        self._home: dict[str, str] = {}
        self._done = self._checked = 0
        self.index = b""
        self.tensors = self.tied = self.bytes = 0

    def write(self) -> None:
        """Write all partitions, and set `index`."""
        ranks = self._plan.ranks
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(PartitionWriter(self._draft / partition_name(rank, ranks), rank)) for rank in range(ranks)
            ]
            for shard in self._source.shards:
                self._convert_shard(shard, writers)
            if not self._home:
                raise CheckpointInvalid(f"{self._source.shards[0].path} holds no tensors")
            for name, file in (self._source.weight_map or {}).items():
                if self._home.get(name) != file:
                    raise CheckpointInvalid(
                        f"The index places tensor {name!r} in {file}, which does not hold it; download both again"
                    )
            partitions = [w.finish() for w in writers]
        self.index = write_index(partitions, (entry for w in writers for entry in w.entries))
        self.tensors, self.tied = len(self._home), writers[0].tied
        self.bytes = sum(p.size for p in partitions)

    def _convert_shard(self, shard: Shard, writers: list[PartitionWriter]) -> None:
        with shard.tensors() as tensors:
            for tensor in tensors:
                _check_name(tensor, shard.path)
                if tensor.name in self._home:
                    raise CheckpointInvalid(f"Tensor {tensor.name!r} is in {self._home[tensor.name]} and in {shard.path.name}")
                self._home[tensor.name] = shard.path.name
                self._convert_tensor(tensor, writers)

    def _convert_tensor(self, tensor: SourceTensor, writers: list[PartitionWriter]) -> None:
        ranks = len(writers)
        split = self._plan.split(tensor.name, tensor.dtype, tensor.shape)
        shape = part_shape(tensor.shape, split, ranks)
        for rank, writer in enumerate(writers):
            writer.add(
                tensor.name,
                tensor.dtype,
                shape,
                tensor.nbytes if split is None else tensor.nbytes // ranks,
                (self._report_piece(piece, split is None) for piece in pieces(tensor, split, rank, ranks)),
                dim=None if split is None else split.dim,
                tie=None if tensor.tie is None else (tensor.tie, split),
            )

    def _report_piece(self, piece: memoryview, whole: bool) -> memoryview:
        self._done += len(piece) // self._plan.ranks if whole else len(piece)
        self._progress("convert", min(self._done, self._source.size), self._source.size)
        return piece

    def report_verified(self, count: int) -> None:
        self._checked += count
        self._progress("verify", self._checked, self.bytes)


def _check_name(tensor: SourceTensor, path: Path) -> None:
    name = tensor.name
    if not 0 < len(name) <= MAX_NAME or not is_text(name):
        raise CheckpointInvalid(f"{path} has a tensor of the name {name!r:.80}, which is empty, too long or no text; rename it")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise CheckpointInvalid(
            f"{path} has tensor {name!r} of {len(tensor.shape)} dimensions; at most {MAX_DIMENSIONS} are allowed"
        )
