"""The manual pages equal the command line's own help, and `man` formats them without a warning."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from thaw.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
MAN = ROOT / "thaw" / "man"
PAGES = sorted(page.name for page in MAN.glob("*.1"))
_generator: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "generate_man.py"))


def test_pages_are_up_to_date() -> None:
    assert {name: (MAN / name).read_text() for name in PAGES} == _generator["pages"](), "run: python docs/generate_man.py"


def test_every_command_has_a_page_with_all_its_options() -> None:
    assert set(PAGES) == {"thaw.1"} | {f"thaw-{e.name}.1" for e in COMMANDS if not e.hidden}
    for entry in COMMANDS:
        if entry.hidden:
            continue
        text = (MAN / f"thaw-{entry.name}.1").read_text().replace("\\-", "-")
        command = entry.load()
        for described in (command, *getattr(command, "commands", {}).values()):
            for parameter in described.params:
                if parameter.param_type_name == "option" and not parameter.hidden:
                    assert f"\\fB{parameter.opts[0]}\\fR" in text, f"{entry.name} {parameter.opts}"


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_sections_of_a_manual(name: str) -> None:
    lines = (MAN / name).read_text().splitlines()
    sections = [line.removeprefix(".SH ") for line in lines if line.startswith(".SH ")]
    assert lines[1].startswith(f".TH {name.removesuffix('.1').upper()}".replace("-", "\\-") + " 1 ")
    assert sections[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert len(sections) == len(set(sections))
    macros = {line.split()[0] for line in lines if line.startswith(".")}
    assert macros <= {'.\\"', ".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".BR", ".br", ".nf", ".fi"}
    assert not [line for line in lines if "[/" in line or "[bold" in line]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_groff_formats_the_page_without_a_warning(name: str) -> None:
    command = ["groff", "-man", "-Kutf8", "-Tutf8", "-ww", str(MAN / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert "THAW" in done.stdout


@pytest.mark.skipif(shutil.which("man") is None or shutil.which("groff") is None, reason="man is not installed")
def test_man_shows_options_and_examples_as_they_are_typed() -> None:
    environment = os.environ | {"MANWIDTH": "200", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    command = ["man", "-P", "cat", "-l", str(MAN / "thaw-models.1")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "--keep-alive KEEP_ALIVE" in done.stdout
    assert "thaw models add llama ~/models/Llama-3.2-1B-Instruct" in done.stdout
    assert "model's own" in done.stdout
