"""The command line imports a command's module when it runs.

The overview's texts equal those of the commands.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.launcher import ROOT
from thaw.cli.app import COMMANDS, main
from thaw.cli.lazy import Entry

HEAVY = {"httpx", "pydantic", "faststream", "nats", "numpy", "torch", "transformers", "psutil", "sqlalchemy", "opentelemetry"}
OF_A_CALL = {"faststream", "nats", "numpy", "torch", "transformers", "sqlalchemy", "opentelemetry", "markdown_it"}


def imported(*arguments: str) -> set[str]:
    """Return the top-level modules that `thaw` with `arguments` imported."""
    script = (
        "import json, sys; from thaw.cli.app import main; main(sys.argv[1:]); "
        "sys.stderr.write('\\n' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_the_overview_imports_no_command(arguments: tuple[str, ...]) -> None:
    assert imported(*arguments) & HEAVY == set()


def test_ps_imports_no_more_than_a_call_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("THAW_HOME", str(tmp_path))
    monkeypatch.delenv("THAW_URL", raising=False)
    assert imported("ps") & OF_A_CALL == set()


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda e: e.name)
def test_overview_text_equals_the_help_of_the_command(entry: Entry) -> None:
    command = entry.load()
    assert " ".join(command.help.split("\n\n")[0].split()) == entry.help
    assert command.name == entry.name
    assert command.hidden == entry.hidden


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda e: e.name)
def test_help_has_no_line_breaks_of_the_source(entry: Entry) -> None:
    command = entry.load()
    for described in (command, *getattr(command, "commands", {}).values()):
        paragraphs = described.help.split("\n\n")
        assert [p for p in paragraphs if "\n" in p and not p.startswith("Examples:")] == []


def test_a_mistyped_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["modles"]) == 2
    assert "models" in capsys.readouterr().err


def test_a_command_of_a_group_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "add", "--help"]) == 0
    assert "Hugging Face" in capsys.readouterr().out
