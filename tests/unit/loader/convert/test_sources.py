"""Every supported input layout, and the errors for the others."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import CheckpointInvalid
from tests.unit.loader.checkpoints import write_checkpoint
from tests.unit.loader.convert.models import same, some_weights, stored, write_torch, write_torch_shards
from weights.convert.job import convert
from weights.formats.checkpoint import open_path

BIN = "pytorch_model.bin"


def untied() -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in some_weights().items()}


def test_sharded_pytorch_files_are_converted(tmp_path: Path) -> None:
    weights = some_weights()
    convert(write_torch_shards(tmp_path / "m", weights, 3), tmp_path / "out")
    assert same(weights, stored(tmp_path / "out"))


@pytest.mark.parametrize(
    "wrap", [lambda w: w, lambda w: {"state_dict": w, "epoch": 3}, lambda w: {"model": w, "optimizer": {"lr": 1.0}}]
)
def test_single_file_is_converted(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    torch.save(wrap(some_weights()), tmp_path / "some.pt")
    convert(tmp_path / "some.pt", tmp_path / "out")
    assert same(some_weights(), stored(tmp_path / "out"))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_adapter_is_converted(tmp_path: Path, name: str) -> None:
    weights = {f"base_model.model.q.lora_{part}.weight": torch.randn(4, 4) for part in "AB"}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    path = tmp_path / "lora" / name
    save_file(weights, path) if name.endswith(".safetensors") else torch.save(weights, path)
    convert(tmp_path / "lora", tmp_path / "out")
    assert same(weights, stored(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_safetensors_are_preferred_over_pickles(tmp_path: Path) -> None:
    write_torch(tmp_path / "m", {"other": torch.zeros(3)})
    weights = write_checkpoint(tmp_path / "m", shards=2)
    convert(tmp_path / "m", tmp_path / "out")
    assert stored(tmp_path / "out").keys() == weights.keys()


def test_parameters_and_conjugated_tensors_are_converted(tmp_path: Path) -> None:
    weights = {"p": torch.nn.Parameter(torch.randn(3, 4)), "c": torch.randn(5, dtype=torch.complex64).conj()}
    convert(write_torch(tmp_path / "m", weights), tmp_path / "out")
    assert same(weights, stored(tmp_path / "out"))


def test_pickle_error_names_the_convert_command(tmp_path: Path) -> None:
    source = write_torch(tmp_path / "m", some_weights())
    for path in (source, source / BIN):
        with pytest.raises(CheckpointInvalid, match=f"thaw convert {path} DST"):
            open_path(path)


# -- unsupported files -----------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_that_would_execute_code_is_refused(tmp_path: Path, legacy: bool) -> None:
    (tmp_path / "m").mkdir()
    content = {"w": torch.zeros(3), "evil": Evil(tmp_path / "ran")}
    torch.save(content, tmp_path / "m" / BIN, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointInvalid, match=f"{BIN} holds more than weights.*not executed") as refused:
        convert(tmp_path / "m", tmp_path / "out")
    assert "mkdir" in refused.value.message
    assert "weights_only" not in refused.value.message, "torch's own advice, which is to execute it"
    (tmp_path / "m" / BIN).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointInvalid, match=BIN):
        convert(tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: [torch.zeros(2)], "no tensors by name"),
        (dict, "no tensors by name"),
        (lambda: {"a": torch.zeros(2), "epoch": 3}, r"what is no tensor: 'epoch' \(int\)"),
        (lambda: {3: torch.zeros(2)}, "what is no tensor: 3"),
        (lambda: {"a": quantised()}, "'a' is quantised"),
        (lambda: {"a": torch.eye(3).to_sparse()}, "'a' is torch.sparse"),
        (lambda: {"a": torch.zeros(3, device="meta")}, "'a' is .* on meta"),
        (lambda: {"a": torch.zeros(1).expand(1 << 40)}, "repeats a few bytes"),
        (lambda: {"a" * 5000: torch.zeros(1)}, "name"),
    ],
)
def test_non_dense_tensors_are_refused(tmp_path: Path, content: Callable[[], Any], message: str) -> None:
    torch.save(content(), tmp_path / "some.pt")
    with pytest.raises(CheckpointInvalid, match=message) as caught:
        convert(tmp_path / "some.pt", tmp_path / "out")
    assert str(tmp_path / "some.pt") in caught.value.message
    assert {p.name for p in tmp_path.iterdir()} == {"some.pt"}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("keep", [0.0, 0.2, 0.6, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, legacy: bool, keep: float) -> None:
    path = write_torch(tmp_path / "m", some_weights(), legacy=legacy) / BIN
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(CheckpointInvalid, match=str(path)):
        convert(tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_an_archive(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "m", some_weights()) / BIN
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointInvalid, match=f"{BIN} is no readable PyTorch file .*checksum"):
        convert(tmp_path / "m", tmp_path / "out")


def test_archive_without_checksums_is_accepted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_torch(tmp_path / "m", some_weights())
    finally:
        torch.serialization.set_crc32_options(True)
    convert(tmp_path / "m", tmp_path / "out")
    assert same(some_weights(), stored(tmp_path / "out"))


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save(some_weights(), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointInvalid, match="compressed"):
        convert(tmp_path / "m.pt", tmp_path / "out")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "pytorch_model-00002-of-00002.bin").unlink(), "00002-of-00002.bin is missing"),
        (
            lambda m: torch.save({"x": torch.zeros(1)}, m / "pytorch_model-00002-of-00002.bin"),
            "places tensor .* which does not hold it",
        ),
        (
            lambda m: (m / "pytorch_model-00002-of-00002.bin").write_bytes((m / "pytorch_model-00001-of-00002.bin").read_bytes()),
            "and in",
        ),
        (lambda m: (m / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../x.bin"}}'), "only names of"),
        (lambda m: (m / "pytorch_model.bin.index.json").write_text("{"), "not valid JSON"),
        (lambda m: (m / "pytorch_model.bin.index.json").unlink(), "several PyTorch files and no pytorch_model.bin.index.json"),
    ],
)
def test_inconsistent_shards_are_refused(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    write_torch_shards(tmp_path / "m", untied())
    spoil(tmp_path / "m")
    with pytest.raises(CheckpointInvalid, match=message):
        convert(tmp_path / "m", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


@pytest.mark.parametrize("name", [BIN, "model.safetensors", "config.json"])
def test_links_out_of_the_model_directory_are_refused(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "secret")
    write_torch(tmp_path / "secret", some_weights())
    (write_torch if name == BIN else write_checkpoint)(tmp_path / "m", untied() if name == BIN else None)  # type: ignore[arg-type]  # by name
    (tmp_path / "m" / name).unlink()
    (tmp_path / "m" / name).symlink_to(tmp_path / "secret" / name)
    with pytest.raises(CheckpointInvalid, match="outside"):
        convert(tmp_path / "m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / BIN)
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "m", tmp_path / "pipe.safetensors"):
        with pytest.raises(CheckpointInvalid, match="not a regular file"):
            convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "message"), [("nothing", "does not exist"), ("empty", "has no weights"), ("done", "converted already")]
)
def test_invalid_sources_are_refused(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    convert(write_torch(tmp_path / "m", some_weights()), tmp_path / "done")
    with pytest.raises(CheckpointInvalid, match=message):
        convert(tmp_path / path, tmp_path / "out")
