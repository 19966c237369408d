"""Which engines `thaw doctor` finds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thaw.launcher.engine_checks import PLACES, find_installed


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for place in PLACES:
        monkeypatch.delenv(place.variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("THAW_CONTAINER_SOCKET", str(tmp_path / "none.sock"))


def test_only_the_builtin_engine_is_found_by_default() -> None:
    assert find_installed() == (["builtin"], [])


def test_llama_server_is_found_only_if_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    assert find_installed() == (["builtin"], [])
    monkeypatch.setenv("THAW_LLAMACPP_SERVER", str(server))
    assert find_installed() == (["builtin", f"llamacpp ({server})"], [])


def test_configured_engines_are_found_and_unusable_ones_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ollama = tmp_path / "ollama"
    ollama.write_text("#!/bin/sh\n")
    ollama.chmod(0o755)
    monkeypatch.setenv("THAW_SGLANG_PYTHON", sys.executable)
    found, faults = find_installed()
    assert found == ["builtin", "ollama (ollama, not run by us)"]
    assert faults == [f"THAW_SGLANG_PYTHON={sys.executable} has no sglang"]
