"""Translation of vLLM's model names by its plug-in.

integration/engines_real tests the load with real vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from weights.vllm_plugin import source_of


@pytest.mark.parametrize(
    ("model", "revision", "source"),
    [
        ("Qwen/Qwen3-0.6B", None, "hf://Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "main", "hf://Qwen/Qwen3-0.6B@main"),
        ("hf://org/name", "main", "hf://org/name"),
        ("s3://bucket/m", None, "s3://bucket/m"),
        ("/nowhere/m", None, "/nowhere/m"),
    ],
)
def test_model_names_of_vllm_become_sources(model: str, revision: str | None, source: str) -> None:
    assert source_of(model, revision) == source


def test_a_directory_is_named_absolutely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory gets an absolute name: the loader has another working directory."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert source_of("org/name", None) == str(tmp_path / "org" / "name")
    assert source_of("./missing", "main") == str(tmp_path / "missing")
