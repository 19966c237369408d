"""`thaw load` end to end: a real process, its report, and refusals."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.unit.loader.checkpoints import tensors, write_checkpoint
from thaw.cli.app import main


def test_load_report_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=5))
    assert main(["load", str(tmp_path), "--tier", "dram", "--threads", "2", "--report", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert {"seconds", "gb_per_s", "cpu_seconds"} <= report.keys()
    assert report["threads"] == 2


def test_load_report_is_printed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, tensors(megabytes=5))
    assert main(["load", str(tmp_path / "model.safetensors"), "--report"]) == 0
    shown = capsys.readouterr().out
    assert "GB/s" in shown
    assert "headers" in shown


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_bad_path_is_a_typed_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["load", str(tmp_path / name), "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "checkpoint_invalid"
    assert str(tmp_path) in error["message"]


def test_a_file_beside_the_weights_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    assert main(["load", str(tmp_path / "config.json"), "--json"]) == 1
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message == f"{tmp_path}/config.json is not a weights file; name its directory {tmp_path} or a .safetensors file"


def test_unknown_source_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "ftp://host/m", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["message"].startswith(
        "ftp://host/m: no place of that kind is known; https://"
    )


def test_verify_fails_for_checkpoints_without_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    assert main(["load", str(tmp_path), "--verify", "--json"]) == 1
    assert "only converted checkpoints carry hashes" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_load_killed_by_the_kernel_is_reported_as_out_of_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = subprocess.CompletedProcess([], -signal.SIGKILL, "", "")
    monkeypatch.setattr("thaw.cli.load.subprocess.run", lambda *_, **__: killed)
    assert main(["load", "/m", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "for want of memory" in error["message"]
