"""`thaw models add`: refusals, and the display of a change."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from shared.contracts.admin import ClusterView, ModelsAdded
from shared.contracts.models import ModelSpec
from tests.unit.cli.views import VIEW
from thaw.cli.api import Api
from thaw.cli.app import main
from thaw.cli.apply import apply_models
from thaw.cli.models import changed_options, option_text, show_difference
from thaw.launcher.home import Home
from thaw.units import parse_duration, written_duration


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ModelSpec]:
    """Mock a mesh with model "m" from /models/m; return the specs sent to it."""
    found: list[ModelSpec] = []
    card = VIEW.card.model_copy(update={"spec": ModelSpec(name="m", source=str(tmp_path / "m"))})

    def add(_: Api, specs: tuple[ModelSpec, ...], **__: object) -> ModelsAdded:
        found.extend(specs)
        return ModelsAdded(changed=tuple(s.name for s in specs))

    monkeypatch.setattr(Api, "find", classmethod(lambda cls: cls("http://127.0.0.1:1")))
    monkeypatch.setattr(
        Api, "cluster", lambda _: ClusterView(scheduler="s", epoch=1, models=(VIEW.model_copy(update={"card": card}),))
    )
    monkeypatch.setattr(Api, "add_models", add)
    for name in ("m", "n"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return found


def test_another_source_needs_replace(sent: list[ModelSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "m", str(tmp_path / "n")]) == 1
    assert "--replace" in capsys.readouterr().err
    assert sent == []
    assert main(["models", "add", "m", str(tmp_path / "n"), "--replace"]) == 0
    assert [s.source for s in sent] == [str(tmp_path / "n")]
    shown = "".join(capsys.readouterr().out.split())
    assert f"source:{tmp_path / 'm'}→{tmp_path / 'n'}" in shown


def test_arguments_of_the_engine_have_values_as_in_yaml(sent: list[ModelSpec], tmp_path: Path) -> None:
    given = [
        "--engine-arg",
        "enable_lora=true",
        "--engine-arg",
        "max_loras=4",
        "--engine-arg",
        "dtype=bfloat16",
        "--engine-arg",
        "a={b: 1}",
    ]
    assert main(["models", "add", "n", str(tmp_path / "n"), "--engine", "vllm", *given]) == 0
    assert sent[0].engine_args == {"enable_lora": True, "max_loras": 4, "dtype": "bfloat16", "a": {"b": 1}}


@pytest.mark.parametrize("text", ["enable_lora", "=1", "a={b"])
def test_argument_of_the_engine_that_is_none_is_refused(
    sent: list[ModelSpec], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "add", "n", str(tmp_path / "n"), "--engine-arg", text]) == 2
    assert f"--engine-arg {text}" in capsys.readouterr().err
    assert sent == []


def test_a_thaw_yaml_shows_what_it_changes(sent: list[ModelSpec], tmp_path: Path) -> None:
    out, spec = io.StringIO(), ModelSpec(name="m", source=str(tmp_path / "n"), pin=True)
    home = Home(tmp_path)
    apply_models(Api.find(), home, (spec,), Console(file=out, width=300))
    assert sent == [spec]
    assert f"source: {tmp_path / 'm'} → {tmp_path / 'n'}" in out.getvalue()
    assert "pin: no → yes" in out.getvalue()


def test_other_options_need_no_replace(sent: list[ModelSpec], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "m", str(tmp_path / "m"), "--keep-alive", "10m"]) == 0
    assert "keep_alive: 5m → 10m" in capsys.readouterr().out
    assert len(sent) == 1


def test_changed_options_show_no_secret() -> None:
    before = ModelSpec(name="m", source="/m", engine="vllm", env={"A": "hidden"})
    after = ModelSpec(name="m", source="/m", engine="vllm", env={"A": "other"}, pin=True)
    assert changed_options(before, after) == ["pin: no → yes", "env: changed"]


def test_change_of_files_alone_is_shown() -> None:
    out = io.StringIO()
    show_difference(Console(file=out, width=100), ModelsAdded(changed=("m",)), {"m": []})
    assert "the model's files" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ((), "-"), ({}, "-"), (True, "yes"), (("a", "b"), "a, b"), ({"min": 0, "max": 1}, "min 0, max 1"), (0, "0")],
)
def test_values_are_shown_without_python(value: object, text: str) -> None:
    assert option_text(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("keep_alive", 300.0, "5m"),
        ("keep_alive", 5400.0, "1h30m"),
        ("keep_alive", -1.0, "-1 (until evicted)"),
        ("keep_alive", 0.0, "0"),
        ("init_timeout", 90, "1m30s"),
        ("response_timeout", 2.5, "2.5s"),
        ("slo", {"ttft": 0.5, "tpot": None, "percentile": 0.98}, "ttft 500ms, tpot -, percentile 0.98"),
        ("memory", 6 * 2**30, "6.0 GiB"),
        ("latency_sensitivity", 1.0, "1.0"),
        ("pin", True, "yes"),
    ],
)
def test_options_are_shown_as_written_in_the_file(name: str, value: object, text: str) -> None:
    assert option_text(value, name) == text


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.25, 0.5, 1, 59, 60, 61, 119.5, 300, 3600, 5400, 90061, 1e6])
def test_a_written_duration_is_read_back(seconds: float) -> None:
    written = written_duration(seconds)
    assert (float(written) if written.replace(".", "").isdigit() else parse_duration(written)) == pytest.approx(seconds, abs=0)
