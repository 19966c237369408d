"""The systemd unit of `thaw service`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thaw.cli.app import main
from thaw.cli.service import UNIT, compose_unit

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze is installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("THAW_HOME", str(tmp_path / "state"))
    return tmp_path


def test_install_writes_the_unit_of_the_user(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / "thaw.yaml"
    config.write_text("models: []\n")
    assert main(["service", "install", "--config", str(config), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    path = folder / "config" / "systemd" / "user" / UNIT
    assert Path(document["path"]) == path
    text = path.read_text()
    assert f"ExecStart={sys.executable} -m thaw up --config {config}\n" in text
    assert f"THAW_HOME={folder / 'state'}" in text
    assert "WantedBy=default.target" in text
    assert document["commands"][1] == f"systemctl --user enable --now {UNIT}"


def test_a_missing_configuration_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "install", "--config", str(folder / "none.yaml"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "not_found"
    assert not (folder / "config").exists()


@needs_systemd
@pytest.mark.parametrize("is_system", [False, True])
@pytest.mark.parametrize("name", ["plain", "with space", 'q"uote', "100%", "a$b"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str, is_system: bool) -> None:
    home = tmp_path / name
    home.mkdir()
    unit = tmp_path / UNIT
    unit.write_text(
        compose_unit([sys.executable, "-m", "thaw", "up", "--config", str(home / "thaw.yaml")], home, is_system=is_system)
    )
    command = ["systemd-analyze", "verify", *([] if is_system else ["--user"]), "--man=no", str(unit)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    faults = [line for line in done.stderr.splitlines() if UNIT in line]
    assert (done.returncode, faults) == (0, []), done.stderr
