"""`thaw wake`, left before the model is there."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from thaw.cli import wake as verbs
from thaw.cli.app import app


class Impatient:
    """An operator who presses Ctrl-C."""

    @classmethod
    def find(cls) -> Impatient:
        return cls()

    def wake(self, model: str) -> Any:
        raise KeyboardInterrupt


def test_who_leaves_is_told_how_to_call_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "Api", Impatient)
    result = CliRunner().invoke(app, ["wake", "coder"])
    assert result.exit_code == 130
    assert "`thaw sleep coder` calls it off" in result.output
