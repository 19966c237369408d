"""Paths that verbs cannot read: one line with the reason, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thaw.cli.app import main
from thaw.cli.output import qualify_commands
from thaw.cli.paths import local_path, model_directory, program
from thaw.config import ConfigError, load_config

VERBS = {
    "load": ["load", "{}"],
    "convert": ["convert", "{}", "/tmp/never-made"],
    "add": ["models", "add", "m", "{}"],
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
@pytest.mark.parametrize(
    ("path", "why"), [("/" + "a" * 300, "File name too long"), ("~nobody-of-that-name/m", "unknown user")], ids=["long", "user"]
)
def test_unreadable_path_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str], verb: list[str], path: str, why: str
) -> None:
    assert main([*(word.format(path) for word in verb), "--json"]) == 1
    assert why in json.loads(capsys.readouterr().out)["error"]["message"]


def test_links_in_a_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    assert main(["models", "add", "m", str(tmp_path / "link"), "--json"]) == 1
    assert "links in a circle" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_source_argument_resolves_to_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    (tmp_path / "x.gguf").write_text("")
    assert model_directory(str(tmp_path / "link")) == tmp_path / "m"
    assert local_path(tmp_path / "link") == tmp_path / "link"
    assert model_directory(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    (tmp_path / "y.gguf").symlink_to(tmp_path / "blob")
    (tmp_path / "blob").touch()
    assert model_directory(str(tmp_path / "y.gguf")) == tmp_path / "y.gguf"
    assert model_directory(str(tmp_path / "none")) is None


def test_in_a_thaw_yaml(tmp_path: Path) -> None:
    long, unknown = "/" + "a" * 300, "~nobody-of-that-name/m"
    (tmp_path / "thaw.yaml").write_text(f"models:\n  - {{name: one, source: {long}}}\n  - {{name: two, source: {unknown}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "thaw.yaml")
    assert sum("cannot be looked at" in line for line in caught.value.lines()) == 2


def test_a_file_as_a_source_is_called_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.txt").write_text("")
    assert main(["models", "add", "m", str(tmp_path / "m.txt"), "--json"]) == 1
    assert "is a file" in json.loads(capsys.readouterr().out)["error"]["message"]
    (tmp_path / "thaw.yaml").write_text(f"models:\n  - {{name: one, source: {tmp_path}/m.txt}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "thaw.yaml")
    assert "is a file" in caught.value.lines()[0]


def test_hints_name_the_program_as_the_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / ".venv" / "bin" / "thaw"
    installed.parent.mkdir(parents=True)
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(installed)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert program() == ".venv/bin/thaw"
    assert qualify_commands("Start it with `thaw up --demo`.") == "Start it with `.venv/bin/thaw up --demo`."
    monkeypatch.setenv("PATH", str(installed.parent))
    assert program() == "thaw"
    monkeypatch.setattr("sys.argv", ["/usr/lib/python3/thaw/__main__.py"])
    assert program() == "thaw"
