"""Which files a model directory in Hugging Face layout consists of, and whether they fit together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.loader.format.safetensors import FileHeader, read_header
from shared.errors import CheckpointInvalid

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
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file. `stamp` (mtime_ns, inode) tells a later change; zero where the file is remote."""

    name: str
    path: Path
    size: int
    header: FileHeader
    stamp: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a model, checked against each other."""

    directory: Path
    files: tuple[WeightFile, ...]


def weight_names(present: Collection[str], where: str) -> tuple[str, ...] | None:
    """The one file that holds all weights; None if an index must be asked. The order of preference is transformers'.

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
            f"{where} has {len(others)} safetensors files ({others[0]}, …) but no {INDEX}; copy the index from where the files came"
        )
    if any(n.endswith(_TORCH_SUFFIXES) for n in present):
        raise CheckpointInvalid(
            f"{where} has PyTorch weights only; save it as safetensors: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise CheckpointInvalid(f"{where} has no weights: {SINGLE}, or {INDEX} with its shards, must be there")


def parse_index(data: bytes, where: str) -> dict[str, str]:
    """The tensor → file name map of a model.safetensors.index.json. File names must be plain: no directory, no `..`."""
    index = parse_json(data, where)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointInvalid(f"{where} has no weight_map; download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _plain(name):
            raise CheckpointInvalid(
                f"{where} sends tensor {tensor!r} to {name!r}: only names of .safetensors files beside it are allowed"
            )
    return weight_map


def _plain(name: str) -> bool:
    return (
        name.endswith(".safetensors")
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


def read_small(path: Path) -> bytes:
    """A configuration file's content. Raises `CheckpointInvalid` if it is missing, unreadable or absurdly large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError as e:
        raise CheckpointInvalid(f"{path} is missing; copy the whole model directory") from e
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}") from e
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointInvalid(f"{path} is over {MAX_JSON_BYTES} bytes; that is no configuration file")
    return data


def check_files(weight_map: Mapping[str, str] | None, files: Iterable[WeightFile], where: str) -> tuple[WeightFile, ...]:
    """`files` if no tensor occurs twice and each tensor of the index is in the file the index names."""
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


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check the headers of all weight files in `directory`. Raises `CheckpointInvalid`."""
    names = weight_names({p.name for p in _entries(directory)}, str(directory))
    weight_map = None
    if names is None:
        weight_map = parse_index(read_small(directory / INDEX), str(directory / INDEX))
        names = tuple(sorted(set(weight_map.values())))
    files = check_files(weight_map, (_open_file(directory / name) for name in names), str(directory))
    return Checkpoint(directory, files)


def open_path(path: Path) -> Checkpoint:
    """The checkpoint that `path` names: a model directory, or one safetensors file. Raises `CheckpointInvalid`."""
    if not path.exists():
        raise CheckpointInvalid(f"{path} does not exist; name a model directory or a .safetensors file")
    if path.is_dir():
        return open_checkpoint(path)
    return Checkpoint(path.parent, check_files(None, (_open_file(path),), str(path.parent)))


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as e:
        raise CheckpointInvalid(f"{directory} cannot be listed: {e.strerror}") from e


def _open_file(path: Path) -> WeightFile:
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
    """A digest of where the files lie, their names, sizes, modification times and headers, and of config.json.

    Contents are not read: that would cost as much as loading. The path is in it because copies of two fine-tunes of one model can agree
    in everything else (images and stores that set every mtime to one value), and sharing memory between them would be wrong answers.
    """
    digest = hashlib.sha256(f"directory\0{checkpoint.directory.resolve()}\0".encode())
    for file in checkpoint.files:
        digest.update(f"{file.name}\0{file.size}\0{file.stamp[0]}\0{hashlib.sha256(file.header.raw).hexdigest()}\0".encode())
    digest.update(config)
    return digest.hexdigest()[:32]
