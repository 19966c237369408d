"""The first grammar of a changed vLLM, with a stand-in for vLLM's manager of grammars."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weights.vllm_switch import _renew_grammars


class Grammars:
    """Stands for vLLM's `StructuredOutputManager`."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config="config of the new model")
        self.tokenizer = "old"
        self.backend: Any = SimpleNamespace(destroy=lambda: None)
        self.compiled_with: list[str] = []

    def grammar_init(self, request: str) -> None:
        self.compiled_with.append(self.tokenizer)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """Errors that the next creations of a tokenizer raise."""
    found: list[OSError] = []

    def cached_tokenizer_from_config(config: str) -> str:
        if found:
            raise found.pop()
        return f"tokenizer by the {config}"

    module: Any = ModuleType("vllm.tokenizers")
    module.cached_tokenizer_from_config = cached_tokenizer_from_config
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    return found


def test_first_grammar_after_a_change_creates_the_tokenizer_and_the_compiler(failures: list[OSError]) -> None:
    grammars = Grammars()
    _renew_grammars(grammars)
    assert (grammars.backend, grammars.tokenizer) == (None, "old")
    grammars.grammar_init("a")
    grammars.tokenizer = "kept"
    grammars.grammar_init("b")
    assert grammars.compiled_with == ["tokenizer by the config of the new model", "kept"]


def test_tokenizer_that_cannot_be_created_fails_its_request_and_is_tried_again(failures: list[OSError]) -> None:
    grammars = Grammars()
    _renew_grammars(grammars)
    failures.append(OSError("tokenizer.json is not readable now"))
    with pytest.raises(OSError, match="not readable now"):
        grammars.grammar_init("a")
    grammars.grammar_init("b")
    assert grammars.compiled_with == ["tokenizer by the config of the new model"]
