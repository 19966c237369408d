"""Find the files of a model directory, and check that they fit together.

The directory is converted or in the Hugging Face layout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from shared.errors import CheckpointInvalid
from weights.formats import converted
from weights.formats.root import check_inside, mode_of
from weights.formats.safetensors import FileHeader, is_text, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
MAX_JSON_BYTES = 64 * 1024 * 1024
TOKENIZERS = (
    {"tokenizer.json"},
    {"tokenizer.model"},
    {"vocab.json", "merges.txt"},
    {"vocab.txt"},
    {"spiece.model"},
    {"sentencepiece.bpe.model"},
)
TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_OTHER_SUFFIXES = (".json", ".gguf", ".jinja", ".md", ".txt", ".yaml")
"""Endings of files that a person may name in place of the weights beside them."""


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file, or a partition of a converted checkpoint.

    Attributes:
        stamp: (mtime_ns, inode), to detect a later change; zero for a remote file.
    """

    name: str
    path: Path
    size: int
    header: FileHeader
    stamp: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model, checked against each other.

    Attributes:
        ranks: Ranks that `thaw convert --tensor-parallel` has divided it for. If there are several,
            each file is that of a rank, and has that rank's ranges of the tensors.
    """

    directory: Path
    files: tuple[WeightFile, ...]
    ranks: int = 1


def weight_names(present: Collection[str], where: str) -> tuple[str, ...] | None:
    """The one file that holds all weights; None if an index must be asked.

    The order of preference is transformers'.

    Raises `CheckpointInvalid` if there are no safetensors weights among the file names `present`.
    """
    if SINGLE in present:
        return (SINGLE,)
    if INDEX in present:
        return None
    if ADAPTER in present:
        return (ADAPTER,)
    others = sorted(n for n in present if n.endswith(".safetensors") and "/" not in n)
    if len(others) == 1:
        return (others[0],)
    if others:
        raise CheckpointInvalid(
            f"{where} has {len(others)} safetensors files ({others[0]}, …) but no {INDEX}; copy the index from the files' source"
        )
    if any(n.endswith(TORCH_SUFFIXES) for n in present):
        raise CheckpointInvalid(
            f"{where} has PyTorch weights only (pickles are never loaded as they are): thaw convert {where} DST"
        )
    raise CheckpointInvalid(f"{where} has no weights: {SINGLE}, or {INDEX} with its shards, must be there")


def parse_index(data: bytes, where: str, suffixes: tuple[str, ...] = (".safetensors",)) -> dict[str, str]:
    """The tensor → file name map of a model.safetensors.index.json or its like.

    File names must be plain: no directory, no `..`.
    """
    index = parse_json(data, where)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointInvalid(f"{where} has no weight_map; download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name, suffixes):
            raise CheckpointInvalid(
                f"{where} sends tensor {tensor!r:.80} to {name!r:.80}: only names of {' or '.join(suffixes)} files beside it are allowed"
            )
    return weight_map


def _is_plain(name: str, suffixes: tuple[str, ...]) -> bool:
    return (
        is_text(name)
        and name.endswith(suffixes)
        and not name.startswith(".")
        and not any(c in name for c in "/\\\0")
        and len(name.encode()) < 256
    )


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointInvalid(f"{where} is not valid JSON ({e}); download it again") from e
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{where} is not a JSON object; download it again")
    return value


def check_regular(path: Path) -> None:
    """Raise `CheckpointInvalid` for a file that is not regular.

    A pipe would block its reader for ever.
    """
    try:
        mode = path.stat().st_mode
    except OSError:  # opening it says why
        return
    if not S_ISREG(mode):
        raise CheckpointInvalid(f"{path} cannot be read: it is not a regular file; copy the whole model directory")


def read_small(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """A configuration file's content.

    Raises `CheckpointInvalid` if it is missing, unreadable or absurdly large.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            # Python allocates all that may be read beforehand.
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= limit else b""
    except FileNotFoundError as e:
        raise CheckpointInvalid(f"{path} is missing; copy the whole model directory") from e
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
    if size > limit:
        raise CheckpointInvalid(f"{path} is over {limit} bytes; that is no configuration file")
    return data


def check_files(weight_map: Mapping[str, str] | None, files: Iterable[WeightFile], where: str) -> tuple[WeightFile, ...]:
    """Return `files` if they fit together.

    No tensor occurs twice, and each tensor of the index is in the file that the index names.
    """
    checked = tuple(files)
    home: dict[str, str] = {}
    for file in checked:
        for tensor in file.header.tensors:
            if tensor.name in home:
                raise CheckpointInvalid(f"{where}: tensor {tensor.name!r} is in {home[tensor.name]} and in {file.name}")
            home[tensor.name] = file.name
    if not home:
        raise CheckpointInvalid(f"{where}: {checked[0].name} holds no tensors")
    for name, shard in (weight_map or {}).items():
        if home.get(name) != shard:
            raise CheckpointInvalid(
                f"{where}: {INDEX} places tensor {name!r} in {shard}, which does not hold it; download both again"
            )
    return checked


def open_checkpoint(directory: Path, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Read and check the headers of all weight files in `directory`.

    Of a model divided by `thaw convert --tensor-parallel`, the headers are those of `rank` of
    `ranks`.

    Raises:
        CheckpointInvalid: A file is missing or invalid.
    """
    present = {p.name for p in _entries(directory)}
    if converted.INDEX_NAME in present:
        return _open_converted(directory, rank, ranks)
    if ranks != 1:
        raise CheckpointInvalid(
            f"{directory} is not divided for {ranks} ranks: thaw convert {directory} DST --tensor-parallel {ranks}"
        )
    names = weight_names(present, str(directory))
    weight_map = None
    if names is None:
        check_inside(directory, directory / INDEX)
        weight_map = parse_index(read_small(directory / INDEX), str(directory / INDEX))
        names = tuple(sorted(set(weight_map.values())))
    for name in names:
        check_inside(directory, directory / name)
    files = check_files(weight_map, (_open_file(directory / name) for name in names), str(directory))
    return Checkpoint(directory, files)


def open_every_rank(directory: Path) -> Checkpoint:
    """Read and check the headers as `open_checkpoint`, of all ranks of a divided model.

    Raises:
        CheckpointInvalid: A file is missing or invalid.
    """
    path = directory / converted.INDEX_NAME
    if converted.INDEX_NAME not in {p.name for p in _entries(directory)}:
        return open_checkpoint(directory)
    check_inside(directory, path)
    raw = read_small(path, converted.MAX_INDEX_BYTES)
    found = converted.partitions_of(converted.parse_index(raw, str(path)), raw)
    return Checkpoint(directory, tuple(_open_partition(directory / p.file, p) for p in found), len(found))


def open_path(path: Path, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """The checkpoint that `path` names: a model directory, or one safetensors file.

    Raises `CheckpointInvalid`.
    """
    mode = mode_of(path)
    if mode is None:
        raise CheckpointInvalid(f"{path} does not exist; name a model directory or a .safetensors file")
    if S_ISDIR(mode):
        return open_checkpoint(path, rank, ranks)
    if path.name.endswith(TORCH_SUFFIXES):
        raise CheckpointInvalid(f"{path} is a PyTorch file (pickles are never loaded as they are): thaw convert {path} DST")
    if path.suffix in _OTHER_SUFFIXES:
        raise CheckpointInvalid(f"{path} is not a weights file; name its directory {path.parent} or a .safetensors file")
    return Checkpoint(path.parent, check_files(None, (_open_file(path),), str(path.parent)))


def _open_converted(directory: Path, rank: int, ranks: int) -> Checkpoint:
    path = directory / converted.INDEX_NAME
    check_inside(directory, path)
    raw = read_small(path, converted.MAX_INDEX_BYTES)
    partition = converted.partition_of(converted.parse_index(raw, str(path)), raw, str(path), rank, ranks)
    return Checkpoint(directory, (_open_partition(directory / partition.file, partition),))


def _open_partition(path: Path, partition: converted.RankPartition) -> WeightFile:
    check_inside(path.parent, path)
    check_regular(path)
    try:
        stat = path.stat()
    except FileNotFoundError as e:
        raise CheckpointInvalid(f"{path} is missing; convert the model again, or copy the whole directory") from e
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
    if stat.st_size != partition.size:
        raise CheckpointInvalid(
            f"{path} has {stat.st_size} bytes instead of {partition.size}; convert the model again, or copy the whole directory"
        )
    return WeightFile(path.name, path, stat.st_size, partition.header, (stat.st_mtime_ns, stat.st_ino))


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as e:
        raise CheckpointInvalid(f"{directory} cannot be listed: {e.strerror}; check its permissions") from e


def _open_file(path: Path) -> WeightFile:
    check_regular(path)
    try:
        with path.open("rb") as file:
            stat = path.stat()

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            return WeightFile(
                path.name, path, stat.st_size, read_header(str(path), stat.st_size, read), (stat.st_mtime_ns, stat.st_ino)
            )
    except FileNotFoundError as e:
        raise CheckpointInvalid(f"{path} is missing; download it again, or copy the whole model directory") from e
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e


def directory_revision(checkpoint: Checkpoint, config: bytes) -> str:
    """Return a digest of the files' path, names, sizes, times and headers.

    config.json is included. Contents are not read: that would cost as much as loading. The path is
    included because copies of two fine-tunes of one model can agree in everything else (images and
    stores that set every mtime to one value), and sharing memory between them would give wrong
    answers.
    """
    digest = hashlib.sha256(f"directory\0{checkpoint.directory.resolve()}\0".encode())
    for file in checkpoint.files:
        digest.update(f"{file.name}\0{file.size}\0{file.stamp[0]}\0{hashlib.sha256(file.header.raw).hexdigest()}\0".encode())
    digest.update(config)
    return digest.hexdigest()[:32]
