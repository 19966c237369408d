"""The systemd unit of `thaw service`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("is_link", [False, True])
def test_install_leaves_a_unit_that_it_did_not_write(folder: Path, capsys: pytest.CaptureFixture[str], is_link: bool) -> None:
    path = installed(folder)
    assert main(["service", "install", "--json"]) == 0, "its own is written again"
    path.unlink()
    other = folder / "mine.service" if is_link else path
    other.write_text("[Service]\nExecStart=/bin/thaw\n")
    if is_link:
        path.symlink_to(other)
    capsys.readouterr()
    assert main(["service", "install", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "conflict"
    assert other.read_text() == "[Service]\nExecStart=/bin/thaw\n"


def test_a_missing_configuration_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "install", "--config", str(folder / "none.yaml"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "not_found"
    assert not (folder / "config").exists()


@pytest.mark.parametrize("text", ["models: 3\n", "keys:\n  - {name: ci, key: $CI_KEY}\n"])
def test_a_configuration_that_cannot_start_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.delenv("CI_KEY", raising=False)
    config = folder / "thaw.yaml"
    config.write_text(text)
    for verb in ("install", "show"):
        assert main(["service", verb, "--config", str(config), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_config"
    assert not (folder / "config").exists()


def test_the_unit_reads_the_variables_that_its_configuration_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "sec\"r$e`t\\ '#%1"
    monkeypatch.setenv("CI_KEY", secret)
    config, variables = folder / "thaw.yaml", folder / "state" / "service.env"
    config.write_text("keys:\n  - {name: ci, key: '${CI_KEY}'}\n")
    assert main(["service", "install", "--config", str(config), "--json"]) == 0
    unit = json.loads(capsys.readouterr().out)["unit"]
    assert f"EnvironmentFile={variables}\n" in unit
    assert secret not in unit
    assert variables.stat().st_mode & 0o777 == 0o600
    # systemd reads quoted values as a shell does (systemd.exec(5)).
    script = ["env", "-i", "sh", "-c", '. "$0"; printf %s "$CI_KEY"', str(variables)]
    assert subprocess.run(script, capture_output=True, text=True, timeout=60, check=True).stdout == secret
    config.write_text("models: []\n")
    assert main(["service", "install", "--config", str(config), "--json"]) == 0
    assert "EnvironmentFile" not in json.loads(capsys.readouterr().out)["unit"]
    assert not variables.exists()


def test_remove_removes_the_variables(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CI_KEY", "sk-of-the-ci")
    systemctl(folder, monkeypatch)
    config = folder / "thaw.yaml"
    config.write_text("mesh: {admin_key: $CI_KEY}\n")
    assert main(["service", "install", "--config", str(config), "--json"]) == 0
    assert (folder / "state" / "service.env").exists()
    assert removed(capsys)["removed"]
    assert not (folder / "state" / "service.env").exists()


def systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, active: str = "active", disabling: str = "true") -> Path:
    """Put a `systemctl` on the path that logs its arguments: a test has no systemd that runs.

    Returns:
        The file of its calls.
    """
    calls, program = folder / "calls", folder / "bin" / "systemctl"
    program.parent.mkdir()
    case = f"is-active) echo {active} ;; disable) {disabling} ;;"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$1" = --user ] && shift\ncase $1 in {case} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


def removed(capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["service", "remove", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def installed(folder: Path) -> Path:
    assert main(["service", "install", "--json"]) == 0
    return folder / "config" / "systemd" / "user" / UNIT


@pytest.mark.parametrize("active", ["active", "activating", "inactive", "failed"])
def test_remove_stops_and_disables_the_unit_before_its_file_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], active: str
) -> None:
    path, calls = (
        installed(folder),
        systemctl(folder, monkeypatch, active, disabling=f"test -f {folder}/config/systemd/user/{UNIT}"),
    )
    document = removed(capsys)
    assert document == {"path": str(path), "removed": True, "stopped": active.startswith("activ"), "disabled": True}
    assert not path.exists()
    asked = [line.removeprefix("--user ") for line in calls.read_text().splitlines() if "show-environment" not in line]
    assert asked == [f"is-active {UNIT}", f"disable --now {UNIT}", "daemon-reload", f"reset-failed {UNIT}"]
    assert removed(capsys) == {"path": str(path), "removed": False, "stopped": False, "disabled": False}


def test_remove_leaves_the_unit_if_systemd_cannot_stop_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = installed(folder)
    systemctl(folder, monkeypatch, disabling="{ echo 'Access denied' >&2; exit 1; }")
    assert "Access denied" in removed(capsys, status=1)["error"]["message"]
    assert path.exists()


@pytest.mark.parametrize("text", ["[Service]\nExecStart=/bin/thaw\n", None])
def test_remove_leaves_units_that_it_did_not_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path, calls = installed(folder), systemctl(folder, monkeypatch)
    if text is None:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    else:
        path.write_text(text)
    assert removed(capsys, status=1)["error"]["code"] == "conflict"
    assert path.exists()
    assert not calls.exists()


def test_remove_without_a_running_systemd_removes_the_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses the real `systemctl` where there is one: no manager has this directory of run time."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    path = installed(folder)
    link = path.parent / "default.target.wants" / UNIT
    link.parent.mkdir()
    link.symlink_to(path)
    capsys.readouterr()
    assert main(["service", "remove"]) == 0
    text = capsys.readouterr().out
    assert "was not stopped" in text
    assert f"{UNIT}: disabled, removed." in text
    assert [p for p in path.parent.rglob("*") if not p.is_dir()] == []


def test_dollar_signs_are_escaped_in_commands_only() -> None:
    """They have no meaning in Environment= (systemd.exec(5))."""
    lines = compose_unit(["/a$b/python", "-m", "thaw", "up"], Path("/srv/a$b/state"), is_system=True).splitlines()
    assert "ExecStart=/a$$b/python -m thaw up" in lines
    assert "Environment=THAW_HOME=/srv/a$b/state" in lines


def test_the_file_of_variables_is_no_pattern() -> None:
    unit = compose_unit(["thaw"], Path("/s"), is_system=True, variables=Path("/a b/[1]*?\\%.env"))
    assert "EnvironmentFile=/a b/\\[1]\\*\\?\\\\%%.env" in unit.splitlines()


@needs_systemd
@pytest.mark.parametrize("is_system", [False, True])
@pytest.mark.parametrize("name", ["plain", "with space", 'q"uote', "100%", "a$b"])
def test_systemd_accepts_the_unit(tmp_path: Path, name: str, is_system: bool) -> None:
    home = tmp_path / name
    home.mkdir()
    unit = tmp_path / UNIT
    unit.write_text(
        compose_unit(
            [sys.executable, "-m", "thaw", "up", "--config", str(home / "thaw.yaml")],
            home,
            is_system=is_system,
            variables=home / "[a]*?.env",
        )
    )
    command = ["systemd-analyze", "verify", *([] if is_system else ["--user"]), "--man=no", str(unit)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    faults = [line for line in done.stderr.splitlines() if UNIT in line]
    assert (done.returncode, faults) == (0, []), done.stderr
