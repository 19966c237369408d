"""`thaw convert` end to end: a real process, its report, progress bar, refusals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from thaw.cli.app import main

THAW = (sys.executable, "-m", "thaw.cli.app")


def test_conversion_report_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=5))
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "out"), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tensors"], report["ranks"], report["verified"]) == (len(weights), 1, True)
    assert report["destination"] == str(tmp_path / "out")
    assert {"bytes", "seconds", "gb_per_s", "cpu_seconds", "peak_bytes"} <= report.keys()
    assert main(["load", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == report["bytes"]


def test_for_people_and_checked_again_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=5))
    assert main(["convert", str(tmp_path / "m"), str(tmp_path / "out")]) == 0
    assert "6 tensors" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "out"), "--verify"]) == 0
    assert "as they were converted" in capsys.readouterr().out
    partition = tmp_path / "out" / "weights-00000-of-00001.thaw"
    data = bytearray(partition.read_bytes())
    data[0] ^= 1
    partition.write_bytes(data)
    assert main(["convert", str(tmp_path / "out"), "--verify"]) == 1
    assert "are not those that were converted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "code", "expected"),
    [
        (["missing", "out"], 1, "checkpoint_invalid", "does not exist"),
        (["m/tokenizer.json", "out"], 1, "checkpoint_invalid", "is not a weights file; name its directory"),
        (["m", "m"], 1, "conflict", "is there already"),
        (["m", "/proc/out"], 1, "unavailable", "No directory can be made in /proc"),
        (["m", "missing/out"], 1, "unavailable", "missing does not exist; make it first"),
        (["m", "/etc/passwd/out"], 1, "unavailable", "/etc/passwd/out would be below a file; name a directory"),
        (["m", "out", "--tensor-parallel", "2"], 1, "unsupported_architecture", "config.json"),
        (["m", "out", "--tensor-parallel", "0"], 2, "usage", "tensor-parallel"),
        (["m"], 1, "usage", "Name the directory"),
    ],
)
def test_invalid_conversions_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    code: str,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    assert main(["convert", *arguments, "--json"]) == status
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == code
    assert expected in error["message"]
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_a_bar_on_a_terminal_and_ctrl_c(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", 1 << 30)
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        (*THAW, "convert", str(tmp_path / "m"), str(tmp_path / "out")),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    shown = b""
    while b"converting" not in shown:
        shown += os.read(controller, 4096)
    os.killpg(process.pid, signal.SIGINT)
    try:
        while more := os.read(controller, 4096):
            shown += more
    except OSError:  # the terminal's last user has exited
        pass
    os.close(controller)
    assert process.wait(60) == 130
    assert b"Interrupted" in shown
    assert {p.name for p in tmp_path.iterdir()} == {"m"}
