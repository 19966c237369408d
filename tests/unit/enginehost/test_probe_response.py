"""Events of a probe response that count as a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.enginehost.drivers.port import flags
from services.enginehost.drivers.probe_response import response_fingerprint
from shared.errors import EngineFailed


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"choices": [{"text": "ice"}]}, "ice"),
        ({"choices": [{"message": {"content": "ice"}}]}, "ice"),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}, ""),
        ({"choices": [{"message": {"content": None, "reasoning_content": "so"}}]}, ""),
        ({"data": [{"embedding": [0.5, 0.25]}]}, "0.5 0.25"),
    ],
)
def test_fingerprint_is_read_from_tokens_and_vectors(answer: Any, text: str) -> None:
    assert response_fingerprint(json.dumps(answer).encode()) == text


@pytest.mark.parametrize("body", [b"", b"ok", b"{}", b'{"choices": []}', b'{"choices": [{"text": ""}]}', b'{"data": []}'])
def test_probe_response_without_a_token_fails(body: bytes) -> None:
    with pytest.raises(EngineFailed, match="without a token"):
        response_fingerprint(body)


def test_engine_args_become_options() -> None:
    given = {"a_b": 1, "on": True, "off": False, "none": None, "many": ["x", "y"], "map": {"k": 1}}
    assert flags(given) == ["--a-b", "1", "--on", "--no-off", "--many", "x", "y", "--map", '{"k": 1}']
    assert flags({"a_b": 1, "off": False}, underscores=True, no_prefix=False) == ["--a_b", "1"]
