"""A checkpoint's headers and small files, through any tier."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from shared.errors import CheckpointInvalid
from shared.private import write_durably
from weights.formats import converted
from weights.formats.checkpoint import (
    INDEX,
    Checkpoint,
    WeightFile,
    check_files,
    open_checkpoint,
    open_every_rank,
    parse_index,
    read_small,
    weight_names,
)
from weights.formats.safetensors import read_header
from weights.tiers.names import is_code, is_safe, is_small
from weights.tiers.port import Tier, TierFile

_SUMS = ".thaw-sha256.json"
"""Beside the small files: their checksums as they were fetched."""


def bring_small_files(tier: Tier, directory: Path, *, trust_remote_code: bool) -> None:
    """Write the small files of `tier` into `directory`, each whole or not at all.

    They are the configuration and tokenizer files (and Python code, if trusted). An existing file
    is kept if its size and its checksum are right; else it is fetched again. The checksum is the
    source's, or the one recorded when the file was fetched.

    Raises:
        OSError: A file cannot be written. Errors of reading are raised, too.
    """
    recorded = _read_sums(directory)
    sums: dict[str, str] = {}
    for file in tier.files():
        target = directory / file.name
        if not is_small(file.name, file.size) or (is_code(file.name) and not trust_remote_code) or not is_safe(file.name):
            continue
        expected = file.sha256 or recorded.get(file.name)
        if expected is None or _checksum(target, file.size) != expected:
            data = bytearray(file.size)
            tier.read(file, 0, memoryview(data))
            expected = hashlib.sha256(data).hexdigest()
            if file.sha256 not in (None, expected):
                raise CheckpointInvalid(f"{tier.source}/{file.name} arrived with a wrong SHA-256. Try again, or repair the source")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(target, data, mode=0o644)
        sums[file.name] = expected
    if sums.items() - recorded.items():
        write_durably(directory / _SUMS, json.dumps(recorded | sums).encode(), mode=0o644)


def _read_sums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 by file name that an earlier fetch recorded.

    The result is empty if the record cannot be read.
    """
    try:
        found = json.loads((directory / _SUMS).read_bytes())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _checksum(path: Path, size: int) -> str | None:
    """The SHA-256 of `path`; None if it is no file of `size` bytes.

    A file that has not changed since is not read twice.
    """
    try:
        status = path.stat()
        if status.st_size != size:
            return None
        return _hash(path, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    except OSError:
        return None


@functools.lru_cache(maxsize=4096)
def _hash(path: Path, _inode: int, _mtime_ns: int, _ctime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def every_rank_of(tier: Tier, directory: Path) -> Checkpoint:
    """Return the checked headers of the weight files, of all ranks of a divided model.

    Args:
        directory: The directory of the small files.

    Raises:
        CheckpointInvalid: The headers are invalid.
    """
    if tier.directory is not None:
        return open_every_rank(tier.directory)
    files = {file.name: file for file in tier.files()}
    if converted.INDEX_NAME not in files:
        return checkpoint_of(tier, directory)
    raw = read_small(directory / converted.INDEX_NAME, converted.MAX_INDEX_BYTES)
    found = converted.partitions_of(converted.parse_index(raw, f"{tier.source}/{converted.INDEX_NAME}"), raw)
    return Checkpoint(directory, tuple(_partition(p, files, tier, directory) for p in found), len(found))


def checkpoint_of(tier: Tier, directory: Path, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Return the checked headers of the weight files.

    Args:
        directory: The directory of the small files.

    Raises:
        CheckpointInvalid: The headers are invalid.
    """
    if tier.directory is not None:
        return open_checkpoint(tier.directory, rank, ranks)
    files = {file.name: file for file in tier.files()}
    where = tier.source
    if converted.INDEX_NAME in files:
        raw = read_small(directory / converted.INDEX_NAME, converted.MAX_INDEX_BYTES)
        index = converted.parse_index(raw, f"{where}/{converted.INDEX_NAME}")
        return Checkpoint(directory, (_partition(converted.partition_of(index, raw, where, rank, ranks), files, tier, directory),))
    if ranks != 1:
        raise CheckpointInvalid(f"{where} is not divided for {ranks} ranks: thaw convert it with --tensor-parallel {ranks}")
    names, weight_map = weight_names(files, where), None
    if names is None:
        weight_map = parse_index(read_small(directory / INDEX), f"{where}/{INDEX}")
        names = tuple(sorted(set(weight_map.values())))
    weights = tuple(_weight_file(name, files, tier, directory) for name in names)
    return Checkpoint(directory, check_files(weight_map, weights, where))


def _weight_file(name: str, files: Mapping[str, TierFile], tier: Tier, directory: Path) -> WeightFile:
    file = files.get(name)
    if file is None:
        raise CheckpointInvalid(f"{tier.source}/{name} is named by {INDEX} but missing; the source is incomplete")

    def read(offset: int, length: int) -> bytes:
        data = bytearray(min(length, max(0, file.size - offset)))
        tier.read(file, offset, memoryview(data))
        return bytes(data)

    return WeightFile(name, directory / name, file.size, read_header(f"{tier.source}/{name}", file.size, read))


def _partition(found: converted.RankPartition, files: Mapping[str, TierFile], tier: Tier, directory: Path) -> WeightFile:
    file = files.get(found.file)
    if file is None or file.size != found.size:
        raise CheckpointInvalid(f"{tier.source}/{found.file} is missing or not of the size that the index says; convert it again")
    return WeightFile(found.file, directory / found.file, found.size, found.header)
