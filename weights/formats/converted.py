"""Read the index of a converted checkpoint (`thaw convert`, docs/checkpoints.md).

The reader treats the index as hostile until it is checked.

    thaw.index.json                          what is where: this module
    weights-00000-of-00001.thaw              one partition for each rank: the tensors' bytes and
                                             zeros between them, nothing else

A tensor begins on a multiple of ALIGNMENT, a large one on a page; partitions are whole pages long.
Tensors that are tied have the same range. The index's last member is a SHA-256 of all bytes before
it, so that a flipped bit of the index is noticed when it is opened, and each tensor's own SHA-256
is in the index for `verify`, which re-reads the bytes.

The index is one JSON document with each tensor on a line of its own. It is read line by line, and
the first wrong line ends it: parsed whole, 8 MiB of hostile JSON became 5 GB of objects and errors
(measured with pydantic).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from shared.contracts.segment import PAGE, TensorCut
from shared.dtypes import DTYPE_BITS, row_major
from shared.errors import CheckpointInvalid
from weights.formats.safetensors import MAX_DIMENSIONS, MAX_NAME, FileHeader, TensorEntry, is_absurd

INDEX_NAME = "thaw.index.json"
FORMAT: Literal["thaw-checkpoint"] = "thaw-checkpoint"
VERSION: Literal[1] = 1
ALIGNMENT: Literal[256] = 256
"""The alignment that cudaMalloc guarantees, on which kernels rely; cache lines and AVX-512 need 64.
"""
PAGE_ALIGNED_FROM = 16 * PAGE
"""Tensors of 64 KiB or more begin on a page: they can be read directly, mapped and paged out alone.

Costs at most 6 % (of a 64 KiB tensor).
"""
MAX_RANKS = 1024
MAX_INDEX_BYTES = 256 * 1024 * 1024
_LINE_BYTES = 256 * 1024
"""Limit of one line: 1024 partitions take 80 kB, the longest name and most dimensions 30."""
_OPEN = b',"tensors":['
_CLOSE = b"\n]"
_TAIL = b',"sha256":"'
_TAIL_BYTES = len(_TAIL) + 64 + len(b'"}\n')

Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    # pydantic notes every error of a list, and every unknown key where they are forbidden: of a
    # hostile index, gigabytes of errors.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Partition(_Strict):
    """One rank's file.

    Attributes:
        tensors: Number of its entries.
    """

    rank: Natural
    file: str = Field(min_length=1, max_length=255)
    size: Natural
    tensors: Natural


class Entry(_Strict):
    """One tensor of one rank.

    Attributes:
        offset: In bytes from the start of the rank's file.
        size: In bytes.
        stride: In elements.
        dim: The dimension along which tensor parallelism divided it; None: a whole tensor.
        sha256: Of its bytes.
    """

    name: str = Field(min_length=1, max_length=MAX_NAME)
    rank: Natural
    offset: Natural
    size: Natural
    shape: Annotated[tuple[Natural, ...], FailFast(), Field(max_length=MAX_DIMENSIONS)]
    stride: Annotated[tuple[Natural, ...], FailFast(), Field(max_length=MAX_DIMENSIONS)]
    dtype: str
    dim: Natural | None = None
    sha256: Digest


_Line = TypeVar("_Line", bound=_Strict)


class Head(_Strict):
    """The index's first line."""

    format: Literal["thaw-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    alignment: Literal[256] = ALIGNMENT
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    partitions: Annotated[tuple[Partition, ...], FailFast(), Field(max_length=MAX_RANKS)]


class _Version(BaseModel):
    """The fields that distinguish a newer version from a damaged file."""

    format: str
    version: int


@dataclass(frozen=True)
class Index:
    """The checked contents of the whole index."""

    ranks: int
    partitions: tuple[Partition, ...]
    tensors: tuple[Entry, ...]


@dataclass(frozen=True)
class RankPartition:
    """One rank's file and the tensors in it; `header.raw` is the index as stored."""

    file: str
    size: int
    header: FileHeader


def partition_name(rank: int, ranks: int) -> str:
    return f"weights-{rank:05}-of-{ranks:05}.thaw"


def place_after(end: int, size: int) -> int:
    """Return the place of a tensor of `size` bytes that follows one ending at `end`."""
    step = PAGE if size >= PAGE_ALIGNED_FROM else ALIGNMENT
    return -(-end // step) * step


def write_index(partitions: Sequence[Partition], entries: Iterable[Entry]) -> bytes:
    """The index as stored.

    Raises `CheckpointInvalid` if it becomes too long to be read.
    """
    head = Head(ranks=len(partitions), partitions=tuple(partitions)).model_dump_json().encode().removesuffix(b"}")
    body = head + _OPEN + b"\n" + b",\n".join(e.model_dump_json().encode() for e in entries) + _CLOSE
    data = body + _TAIL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    if len(data) > MAX_INDEX_BYTES:
        raise CheckpointInvalid(
            f"The model has too many tensors for {len(partitions)} ranks: their index would have {len(data)} bytes, at most {MAX_INDEX_BYTES} "
            "are read; choose fewer ranks"
        )
    return data


def parse_index(data: bytes, where: str) -> Index:
    """The index that `data`, the content of `where`, holds.

    Raises `CheckpointInvalid` for anything that does not hold exactly.
    """
    end = data.find(b"\n", 0, _LINE_BYTES)
    line = data[: max(0, end)]
    if not line.endswith(_OPEN):
        _refuse_version(data[:_LINE_BYTES], where)
        _raise_invalid(where, "is no valid index: its first line is not one's; convert the model again")
    head = _parse_line(Head, line.removesuffix(_OPEN) + b"}", "first line", where)
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if tail != _TAIL + hashlib.sha256(body).hexdigest().encode() + b'"}\n' or not body.endswith(_CLOSE):
        _raise_invalid(where, "was changed or damaged after it was written (its checksum is wrong); convert the model again")
    index = Index(head.ranks, head.partitions, tuple(_entries(data, end + 1, len(body) - len(_CLOSE), where)))
    _check(index, where)
    return index


def _entries(data: bytes, start: int, stop: int, where: str) -> Iterator[Entry]:
    """Parse the lines from `start` to `stop`, one tensor each."""
    number = 0
    while start < stop:
        end = data.find(b",\n", start, min(stop, start + _LINE_BYTES))
        if end < 0:
            end = stop
        if end - start > _LINE_BYTES:
            _raise_invalid(
                where, f"is no valid index: tensor {number} is described in more than {_LINE_BYTES} bytes; convert the model again"
            )
        yield _parse_line(Entry, data[start:end], f"tensor {number}", where)
        start, number = end + 2, number + 1
    if number and start == stop:
        _raise_invalid(where, f"is no valid index: a comma follows its last tensor, {number - 1}; convert the model again")


def _parse_line(kind: type[_Line], line: bytes, what: str, where: str) -> _Line:
    try:
        return kind.model_validate_json(line)
    except ValidationError as e:
        _refuse_version(line, where)
        first = e.errors(include_url=False, include_input=False)[0]
        place = ".".join([what, *map(str, first["loc"])])
        raise CheckpointInvalid(f"{where} is no valid index: {place:.80}: {first['msg']:.120}; convert the model again") from e


def _refuse_version(line: bytes, where: str) -> None:
    try:
        found = _Version.model_validate_json(line)
    except ValidationError:
        return
    if found.format == FORMAT and found.version != VERSION:
        _raise_invalid(
            where, f"has version {found.version}, and this Thaw reads version {VERSION}; convert the model again with it"
        )


def _raise_invalid(where: str, what: str) -> NoReturn:
    raise CheckpointInvalid(f"{where} {what}")


def _check(index: Index, where: str) -> None:
    found = {p.rank: p for p in index.partitions}
    if sorted(found) != list(range(index.ranks)) or len(index.partitions) != index.ranks:
        _raise_invalid(where, f"is for {index.ranks} ranks and lists {len(index.partitions)} partitions that do not match")
    for p in index.partitions:
        if p.file != partition_name(p.rank, index.ranks):
            _raise_invalid(
                where, f"names the file {p.file!r:.80} for rank {p.rank}; only {partition_name(p.rank, index.ranks)} is allowed"
            )
    by_rank: list[list[Entry]] = [[] for _ in range(index.ranks)]
    for entry in index.tensors:
        if entry.rank >= index.ranks:
            _raise_invalid(where, f"gives tensor {entry.name!r:.80} to rank {entry.rank} of {index.ranks}")
        _check_entry(entry, found[entry.rank], where)
        by_rank[entry.rank].append(entry)
    for rank, entries in enumerate(by_rank):
        if len(entries) != found[rank].tensors or not entries:
            _raise_invalid(where, f"says that rank {rank} has {found[rank].tensors} tensors and lists {len(entries)}")
        _check_together(entries, where)


def _check_entry(entry: Entry, partition: Partition, where: str) -> None:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        _raise_invalid(where, f"gives tensor {entry.name!r:.80} the unknown dtype {entry.dtype!r:.40}")
    if is_absurd(entry.shape, bits):
        _raise_invalid(where, f"gives tensor {entry.name!r:.80} a shape that nothing can hold")
    if math.prod(entry.shape) * bits != entry.size * 8:
        _raise_invalid(where, f"gives tensor {entry.name!r:.80} {entry.size} bytes, which {entry.dtype} of its shape does not take")
    if entry.stride != row_major(entry.shape):
        _raise_invalid(where, f"gives tensor {entry.name!r:.80} a stride that is not row-major")
    if entry.offset % ALIGNMENT:
        _raise_invalid(where, f"places tensor {entry.name!r:.80} at byte {entry.offset}, not on a multiple of {ALIGNMENT}")
    if entry.offset + entry.size > partition.size:
        _raise_invalid(where, f"places tensor {entry.name!r:.80} beyond the end of {partition.file}")
    if entry.dim is not None and entry.dim >= len(entry.shape):
        _raise_invalid(where, f"says that tensor {entry.name!r:.80} is divided along a dimension that it does not have")


def _check_together(entries: list[Entry], where: str) -> None:
    if len({e.name for e in entries}) != len(entries):
        _raise_invalid(where, f"lists a tensor of rank {entries[0].rank} twice")
    stored = sorted((e for e in entries if e.size), key=lambda e: (e.offset, e.size))
    for one, other in itertools.pairwise(stored):
        if other.offset >= one.offset + one.size:
            continue
        if (one.offset, one.size, one.dtype, one.sha256) != (other.offset, other.size, other.dtype, other.sha256):
            _raise_invalid(where, f"has tensor {other.name!r:.80} overlapping {one.name!r:.80}")


def partition_of(index: Index, raw: bytes, where: str, rank: int = 0, ranks: int = 1) -> RankPartition:
    """The file of `rank` of `ranks`.

    Raises `CheckpointInvalid` if the model was divided otherwise.
    """
    if index.ranks != ranks or not 0 <= rank < ranks:
        _raise_invalid(
            where,
            f"belongs to a model divided for {index.ranks} rank(s), and rank {rank} of {ranks} was asked for; convert the original "
            f"with --tensor-parallel {ranks}",
        )
    return partitions_of(index, raw)[rank]


def partitions_of(index: Index, raw: bytes) -> tuple[RankPartition, ...]:
    """The files of all ranks, in their order."""
    by_rank: list[list[Entry]] = [[] for _ in range(index.ranks)]
    for entry in sorted(index.tensors, key=lambda e: (e.offset, e.size)):
        by_rank[entry.rank].append(entry)
    found = []
    for partition in sorted(index.partitions, key=lambda p: p.rank):
        tensors = tuple(
            TensorEntry(e.name, e.dtype, e.shape, e.offset, e.size, e.sha256, _cut(e, index.ranks)) for e in by_rank[partition.rank]
        )
        found.append(RankPartition(partition.file, partition.size, FileHeader(tensors, raw)))
    return tuple(found)


def _cut(entry: Entry, ranks: int) -> TensorCut | None:
    """Return the range of the whole tensor that an entry is: ranks have equal ones, in order."""
    if entry.dim is None or not entry.shape[entry.dim]:
        return None
    length = entry.shape[entry.dim]
    return TensorCut(dim=entry.dim, start=entry.rank * length, length=ranks * length)
