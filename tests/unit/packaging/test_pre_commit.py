"""The hooks of .pre-commit-config.yaml run with what `make install` installs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def hooks() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return [hook for repository in document["repos"] for hook in repository["hooks"]]


@pytest.mark.parametrize("hook", hooks(), ids=lambda hook: hook["id"])
def test_a_hook_runs_a_program_of_the_environment_on_files_that_exist(hook: dict[str, Any]) -> None:
    program, *arguments = shlex.split(hook["entry"])
    directory, name = Path(program).parent, Path(program).name
    assert directory == Path(".venv/bin")
    assert hook["language"] == "system"
    assert (Path(sys.prefix) / "bin" / name).exists()
    for argument in arguments:
        assert argument.startswith("--") or argument in ("check", "format") or (ROOT / argument).is_file(), argument
