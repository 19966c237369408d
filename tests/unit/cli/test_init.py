"""`thaw init` writes a file that `thaw up` accepts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from thaw.cli.app import main
from thaw.cli.init import compose_file
from thaw.config.load import load_config
from thaw.launcher.gpus import Gpu

GIB = 2**30
GPUS = (Gpu("cuda:0", "NVIDIA H100", 80 * GIB, 79 * GIB), Gpu("cuda:1", "NVIDIA H100", 80 * GIB, 79 * GIB))


@pytest.mark.parametrize("gpus", [(), GPUS], ids=["cpu", "gpus"])
@pytest.mark.parametrize("models", [{}, {"qwen3": "hf://Qwen/Qwen3-0.6B", "own": "https://host/m#1"}], ids=["none", "two"])
def test_the_file_is_valid_and_names_the_devices(tmp_path: Path, gpus: tuple[Gpu, ...], models: dict[str, str]) -> None:
    path = tmp_path / "thaw.yaml"
    path.write_text(compose_file(gpus, 10 * GIB, 9000, models))
    file = load_config(path)
    assert file.mesh.port == 9000
    assert set(file.mesh.nodes["node-0"].devices) == ({g.device_id for g in gpus} or {"cpu:0"})
    if not gpus:
        assert file.mesh.nodes["node-0"].devices["cpu:0"] == 7 * GIB
    assert [m.name for m in file.models] == list(models)


@pytest.mark.parametrize("source", ["/models/a, b", "/models/{x}", "/models/a #1", "hf://a/b@[x]", '/models/"a"', "/models/a: b"])
def test_sources_with_characters_of_yaml_are_kept(tmp_path: Path, source: str) -> None:
    path = tmp_path / "thaw.yaml"
    path.write_text(compose_file((), 10 * GIB, 9000, {"own": source}))
    assert yaml.safe_load(path.read_text())["models"] == [{"name": "own", "source": source}]


def test_little_memory_is_given_in_mebibytes() -> None:
    assert "cpu:0: 716MiB" in compose_file((), GIB, 8080, {})


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thaw.yaml"
    assert main(["init", str(path), "--yes", "--model", "a=/models/a", "--json"]) == 0
    written = path.read_text()
    assert json.loads(capsys.readouterr().out)["yaml"] == written
    assert "{name: a, source: /models/a}" in written
    assert main(["init", str(path), "--yes", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "file_exists"
    assert path.read_text() == written
    assert main(["init", str(tmp_path / "other.yaml"), "--model", "a", "--json"]) != 0


class Terminal(io.StringIO):
    """Standard input of a terminal that has been typed into."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("gpus", "typed", "devices", "models"),
    [
        pytest.param((), ["", "", ""], {"cpu:0": 7 * GIB}, [], id="defaults"),
        pytest.param((), ["much", "11GiB", "0", "50%", "", ""], {"cpu:0": "50%"}, [], id="wrong sizes"),
        pytest.param(GPUS, ["", "0", "9000", "hf://org/a", "a"], {"cuda:0": "90%"}, ["a"], id="one gpu of two"),
        pytest.param(GPUS, ["0", "0", "2GiB", "", ""], {"cpu:0": 2 * GIB}, [], id="no gpu of two"),
    ],
)
def test_memory_of_devices_port_and_a_model_are_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: tuple[Gpu, ...],
    typed: list[str],
    devices: dict[str, object],
    models: list[str],
) -> None:
    monkeypatch.setattr("thaw.cli.init.find_gpus", lambda: gpus)
    monkeypatch.setattr("thaw.cli.init.available_memory", lambda: 10 * GIB)
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in typed)))
    path = tmp_path / "thaw.yaml"
    assert main(["init", str(path)]) == 0
    file = load_config(path)
    assert dict(file.mesh.nodes["node-0"].devices) == devices
    assert [m.name for m in file.models] == models
    assert file.mesh.port == (9000 if "9000" in typed else 8080)
    assert ("of at most 10.0 GiB" in capsys.readouterr().out) == ("much" in typed)


def test_shell_completion_knows_commands_of_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts of `thaw --install-completion` ask so."""
    monkeypatch.setattr(sys, "argv", ["thaw"])
    monkeypatch.setenv("_THAW_COMPLETE", "complete_bash")
    for words, expected in (
        ("thaw serv", {"service"}),
        ("thaw service ", {"install", "remove", "show"}),
        ("thaw up --dem", {"--demo"}),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        main([])
        assert set(capsys.readouterr().out.split()) == expected
