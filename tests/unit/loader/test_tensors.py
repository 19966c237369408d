"""`load_tensors` and the timed load.

The bytes equal those of safetensors, memory is freed, and errors are typed.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CheckpointInvalid
from tests.integration.loader.tiers_server import TierServer
from tests.support.descriptors import open_files
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.shared_mappings import mappings, named_mappings
from weights.load import main, measure
from weights.tensors import load_tensors

_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


def test_sharded_model_is_loaded(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=40), shards=3)
    gc.collect()
    before, named = mappings(), named_mappings()
    found = load_tensors(tmp_path)
    assert mappings() > before
    assert named_mappings() <= named
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(found[name].numpy(), value)


def test_every_dtype_equals_that_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    raw = torch.arange(64, dtype=torch.uint8)
    save_file({str(d): (raw % 2).bool() if d is torch.bool else raw.clone().view(d) for d in _DTYPES}, path)
    expected, found = load_file(path), load_tensors(path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.shape == expected[name].shape
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))


def test_unpadded_header_is_supported(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (7 - len(header) % 8)
    values = np.array([1.5, -2.0], dtype=np.float32)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    found = load_tensors(path)["w"]
    assert found.tolist() == values.tolist()
    assert found.data_ptr() % 4 == 0


def test_memory_lives_as_long_as_any_tensor(tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, tensors(megabytes=5))
    gc.collect()
    before = mappings()
    found = load_tensors(tmp_path)
    kept = found["layers.1.weight"][3:]
    del found
    gc.collect()
    assert mappings() == before + 1
    assert np.array_equal(kept.numpy(), weights["layers.1.weight"][3:])
    kept += 1  # private: writable, and the file is unchanged
    del kept
    gc.collect()
    assert mappings() == before
    assert np.array_equal(load_tensors(tmp_path)["layers.1.weight"].numpy(), weights["layers.1.weight"])


def test_torch_is_not_imported_with_the_module() -> None:
    code = "import sys, weights.tensors, weights.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dtype_unknown_to_torch_is_refused_before_reading(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path = tmp_path / "six.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(CheckpointInvalid, match=r"six\.safetensors: torch has no type for tensor 'w' of dtype F6_E2M3"):
        load_tensors(path)


def test_missing_and_truncated_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="does not exist; name a model directory"):
        load_tensors(tmp_path / "nothing")
    with pytest.raises(CheckpointInvalid, match="has no weights"):
        load_tensors(tmp_path)
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointInvalid, match="too short"):
        load_tensors(tmp_path / "short.safetensors")


def test_a_failed_load_keeps_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    gc.collect()
    before, files = mappings(), open_files()
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointInvalid, match="Input/output error"):
        load_tensors(tmp_path)
    gc.collect()
    assert mappings() == before
    assert open_files() <= files


def test_a_timed_load_accounts_for_every_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=20), shards=2)
    gc.collect()
    before = mappings()
    report = measure(tmp_path, threads=2)
    assert mappings() == before
    assert report["bytes"] == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert report["bytes"] == report["direct_bytes"] + report["cached_bytes"] + report["buffered_bytes"]
    assert [s["stage"] for s in report["stages"]] == ["headers", "read"]
    assert sum(s["seconds"] for s in report["stages"]) == pytest.approx(report["seconds"], abs=1e-5)
    assert report["gb_per_s"] == pytest.approx(report["bytes"] / report["seconds"] / 1e9, rel=1e-3, abs=0.51e-3)
    assert report["cpu_seconds"] > 0


def test_the_command_prints_a_refusal_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "checkpoint_invalid"


@pytest.mark.parametrize("ready", [False, True])
def test_a_url_is_loaded_straight_into_memory(tmp_path: Path, ready: bool) -> None:
    weights = write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=20), shards=2)
    server = TierServer(tmp_path / "www")
    try:
        report = measure(f"{server.url}/m", threads=2, ready=ready)
        found = load_tensors(f"{server.url}/m")
    finally:
        server.close()
    assert (
        report["bytes"] == report["remote_bytes"] == sum(p.stat().st_size for p in (tmp_path / "www" / "m").glob("*.safetensors"))
    )
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert np.array_equal(found[name].numpy(), value)


def test_measured_load_fills_prepared_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=20))
    gc.collect()
    before = mappings()
    assert measure(tmp_path, threads=2, ready=True)["cpu_seconds"] > 0
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointInvalid):
        measure(tmp_path, threads=2, ready=True)
    assert mappings() == before
