"""`thaw chat` prints the text of a model without sequences that a terminal obeys."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from thaw.cli import chat
from thaw.cli.app import main
from thaw.errors import CommandError

GENERATED = "one\x1b]52;c;c2VjcmV0\x07 \x1b[2Jtwo\nlines\x1b[31m\x07"


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(_api: Any, _model: str, _messages: Any, completion: Any, **_: Any) -> Iterator[str]:
        completion.text = GENERATED
        yield GENERATED

    monkeypatch.setenv("THAW_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(chat, "stream_chat", stream)


def test_control_sequences_of_a_model_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "hi"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == "one two\nlines"


def test_json_has_the_text_as_it_was_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "m", "hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == GENERATED


@pytest.mark.parametrize("arguments", [["m"], ["m", "hi \udcff"], ["m", "hi", "--system", "\udcff"]])
def test_a_prompt_that_is_no_utf8_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi \xff"), encoding="utf-8"))
    assert main(["chat", *arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_prompt"


@pytest.mark.parametrize(
    ("pieces", "error", "printed"),
    [
        (["one", " two"], CommandError("The engine is gone."), "one two\n"),
        ([], CommandError("The engine is gone."), ""),
        (["one"], KeyboardInterrupt(), "one\n"),
    ],
)
def test_an_error_begins_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[str],
    error: BaseException,
    printed: str,
) -> None:
    def fail(*_: Any, **__: Any) -> Iterator[str]:
        yield from pieces
        raise error

    monkeypatch.setattr(chat, "stream_chat", fail)
    assert main(["chat", "m", "hi"]) != 0
    assert capsys.readouterr().out == printed
