"""Settings of every driver, and model cards for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.contracts.models import ModelCard
from tests.support.hosted import MIB, hosted_card

SETTINGS = {
    "vllm": "THAW_VLLM_PYTHON",
    "sglang": "THAW_SGLANG_PYTHON",
    "llamacpp": "THAW_LLAMACPP_SERVER",
    "tensorrt-llm": "THAW_TRTLLM_SERVE",
    "ollama": "THAW_OLLAMA_PROGRAM",
}
ENGINES = sorted(SETTINGS)


def card_of(tmp_path: Path, engine: str, **more: Any) -> ModelCard:
    if engine == "ollama":
        return hosted_card("engine://qwen3:0.6b", engine, memory=MIB, **more)
    source = tmp_path / "model.gguf" if engine == "llamacpp" else tmp_path
    source.touch()
    return hosted_card(source, engine, **more)
