"""The index of a converted checkpoint (`thaw convert`, docs/checkpoints.md), taken for hostile until proved otherwise.

    thaw.index.json                          what is where: this module
    weights-00000-of-00001.thaw              one partition for each rank: the tensors' bytes and zeros between them, nothing else

A tensor begins on a multiple of ALIGNMENT, a large one on a page; partitions are whole pages long. Tensors that are tied have the same
range. The index's last member is a SHA-256 of all bytes before it, so that a flipped bit of the index is noticed when it is opened, and
each tensor's own SHA-256 is in the index for whoever re-reads the bytes (`verify`).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.loader.format.safetensors import FileHeader, TensorEntry
from shared.contracts.segment import PAGE
from shared.dtypes import DTYPE_BITS, row_major
from shared.errors import CheckpointInvalid

INDEX_NAME = "thaw.index.json"
FORMAT: Literal["thaw-checkpoint"] = "thaw-checkpoint"
VERSION: Literal[1] = 1
ALIGNMENT: Literal[256] = 256
"""What cudaMalloc promises of every address, and so all that kernels rely on; cache lines and AVX-512 want 64."""
PAGE_ALIGNED_FROM = 16 * PAGE
"""Tensors of 64 KiB or more begin on a page: they can be read directly, mapped and paged out alone. Costs at most 6 % (of a 64 KiB tensor)."""
MAX_RANKS = 1024
MAX_NAME = 4096
MAX_DIMENSIONS = 64
_TAIL = b',"sha256":"'
_TAIL_BYTES = len(_TAIL) + 64 + len(b'"}\n')

Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Partition(_Strict):
    """One rank's file; `tensors` counts its entries."""

    rank: Natural
    file: str = Field(min_length=1, max_length=255)
    size: Natural
    tensors: Natural


class Entry(_Strict):
    """One tensor of one rank. `offset` and `size` in bytes; `stride` in elements; `dim` is the dimension along which tensor parallelism
    divided it, null for a whole tensor; `sha256` of its bytes."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    rank: Natural
    offset: Natural
    size: Natural
    shape: Annotated[tuple[Natural, ...], Field(max_length=MAX_DIMENSIONS)]
    stride: Annotated[tuple[Natural, ...], Field(max_length=MAX_DIMENSIONS)]
    dtype: str
    dim: Natural | None = None
    sha256: Digest


class Index(_Strict):
    """The whole index, as stored but for its own digest."""

    format: Literal["thaw-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    alignment: Literal[256] = ALIGNMENT
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    partitions: Annotated[tuple[Partition, ...], Field(max_length=MAX_RANKS)]
    tensors: tuple[Entry, ...]


class _Stored(Index):
    sha256: Digest


class _Head(BaseModel):
    """As much as tells a newer version from a damaged file."""

    format: str
    version: int


@dataclass(frozen=True)
class RankPartition:
    """One rank's file and the tensors in it; `header.raw` is the index as stored."""

    file: str
    size: int
    header: FileHeader


def partition_name(rank: int, ranks: int) -> str:
    return f"weights-{rank:05}-of-{ranks:05}.thaw"


def place_after(end: int, size: int) -> int:
    """Where a tensor of `size` bytes goes that follows one ending at `end`."""
    step = PAGE if size >= PAGE_ALIGNED_FROM else ALIGNMENT
    return -(-end // step) * step


def write_index(partitions: Sequence[Partition], entries: Iterable[Entry]) -> bytes:
    """The index as stored."""
    index = Index(ranks=len(partitions), partitions=tuple(partitions), tensors=tuple(entries))
    body = index.model_dump_json().encode().removesuffix(b"}")
    return body + _TAIL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def parse_index(data: bytes, where: str) -> Index:
    """The index that `data`, the content of `where`, holds. Raises `CheckpointInvalid` for anything that does not hold exactly."""
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    try:
        index = _Stored.model_validate_json(data)
    except ValidationError as e:
        if (version := _version(data)) not in (None, VERSION):
            _invalid(where, f"has version {version}, and this Thaw reads version {VERSION}; convert the model again with it")
        first = e.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "JSON"
        raise CheckpointInvalid(f"{where} is no valid index: {place:.80}: {first['msg']:.120}; convert the model again") from e
    if tail[: len(_TAIL)] != _TAIL or hashlib.sha256(body).hexdigest() != index.sha256:
        _invalid(where, "was changed or damaged after it was written (its checksum is wrong); convert the model again")
    _check(index, where)
    return index


def _version(data: bytes) -> int | None:
    try:
        head = _Head.model_validate_json(data)
    except ValidationError:
        return None
    return head.version if head.format == FORMAT else None


def _invalid(where: str, what: str) -> NoReturn:
    raise CheckpointInvalid(f"{where} {what}")


def _check(index: Index, where: str) -> None:
    found = {p.rank: p for p in index.partitions}
    if sorted(found) != list(range(index.ranks)) or len(index.partitions) != index.ranks:
        _invalid(where, f"is for {index.ranks} ranks and lists {len(index.partitions)} partitions that do not match")
    for p in index.partitions:
        if p.file != partition_name(p.rank, index.ranks):
            _invalid(
                where, f"names the file {p.file!r:.80} for rank {p.rank}; only {partition_name(p.rank, index.ranks)} is allowed"
            )
    by_rank: list[list[Entry]] = [[] for _ in range(index.ranks)]
    for entry in index.tensors:
        if entry.rank >= index.ranks:
            _invalid(where, f"gives tensor {entry.name!r:.80} to rank {entry.rank} of {index.ranks}")
        _check_entry(entry, found[entry.rank], where)
        by_rank[entry.rank].append(entry)
    for rank, entries in enumerate(by_rank):
        if len(entries) != found[rank].tensors or not entries:
            _invalid(where, f"says that rank {rank} has {found[rank].tensors} tensors and lists {len(entries)}")
        _check_together(entries, where)


def _check_entry(entry: Entry, partition: Partition, where: str) -> None:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        _invalid(where, f"gives tensor {entry.name!r:.80} the unknown dtype {entry.dtype!r:.40}")
    if math.prod(entry.shape) * bits != entry.size * 8:
        _invalid(where, f"gives tensor {entry.name!r:.80} {entry.size} bytes, which {entry.dtype} of its shape does not take")
    if entry.stride != row_major(entry.shape):
        _invalid(where, f"gives tensor {entry.name!r:.80} a stride that is not row-major")
    if entry.offset % ALIGNMENT:
        _invalid(where, f"places tensor {entry.name!r:.80} at byte {entry.offset}, not on a multiple of {ALIGNMENT}")
    if entry.offset + entry.size > partition.size:
        _invalid(where, f"places tensor {entry.name!r:.80} beyond the end of {partition.file}")
    if entry.dim is not None and entry.dim >= len(entry.shape):
        _invalid(where, f"says that tensor {entry.name!r:.80} is divided along a dimension that it does not have")


def _check_together(entries: list[Entry], where: str) -> None:
    if len({e.name for e in entries}) != len(entries):
        _invalid(where, f"lists a tensor of rank {entries[0].rank} twice")
    stored = sorted((e for e in entries if e.size), key=lambda e: (e.offset, e.size))
    for one, other in itertools.pairwise(stored):
        if other.offset >= one.offset + one.size:
            continue
        if (one.offset, one.size, one.dtype, one.sha256) != (other.offset, other.size, other.dtype, other.sha256):
            _invalid(where, f"has tensor {other.name!r:.80} overlapping {one.name!r:.80}")


def partition_of(index: Index, raw: bytes, where: str, rank: int = 0, ranks: int = 1) -> RankPartition:
    """The file of `rank` of `ranks`. Raises `CheckpointInvalid` if the model was divided otherwise."""
    if index.ranks != ranks or not 0 <= rank < ranks:
        _invalid(
            where,
            f"belongs to a model divided for {index.ranks} rank(s), and rank {rank} of {ranks} was asked for; convert the original "
            f"with --tensor-parallel {ranks}",
        )
    partition = next(p for p in index.partitions if p.rank == rank)
    entries = sorted((e for e in index.tensors if e.rank == rank), key=lambda e: (e.offset, e.size))
    tensors = tuple(TensorEntry(e.name, e.dtype, e.shape, e.offset, e.size, e.sha256) for e in entries)
    return RankPartition(partition.file, partition.size, FileHeader(tensors, raw))
