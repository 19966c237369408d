"""A checkpoint's headers and small files, through any tier."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from services.loader.format import converted
from services.loader.format.checkpoint import (
    INDEX,
    Checkpoint,
    WeightFile,
    check_files,
    open_checkpoint,
    parse_index,
    read_small,
    weight_names,
)
from services.loader.format.safetensors import read_header
from services.loader.tiers.names import is_code, is_safe, is_small
from services.loader.tiers.port import Tier, TierFile
from shared.errors import CheckpointInvalid


def bring_small_files(tier: Tier, directory: Path, *, trust_remote_code: bool) -> None:
    """Write the configuration and tokenizer files (and Python code, if trusted) of `tier` into `directory`, each whole or not at all.

    What is there already is kept. Raises what reading raises, and `OSError`.
    """
    for file in tier.files():
        target = directory / file.name
        if not is_small(file.name, file.size) or (is_code(file.name) and not trust_remote_code):
            continue
        if not is_safe(file.name) or target.exists():
            continue
        data = bytearray(file.size)
        tier.read(file, 0, memoryview(data))
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(target, data)


def _write_whole(target: Path, data: bytes | bytearray) -> None:
    fd, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        Path(draft).chmod(0o644)
        Path(draft).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise


def checkpoint_of(tier: Tier, directory: Path, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """The checked headers of the weight files. `directory`: where the small files lie. Raises `CheckpointInvalid`."""
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
