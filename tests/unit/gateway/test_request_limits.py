"""Requests that are cheap to send and expensive to serve are refused early."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.domain.admission import Admission, ByteLimits
from services.gateway.domain.request_limits import RequestLimits
from services.gateway.http.parsing import json_cost
from services.gateway.http.parsing.json_cost import check_json_cost
from services.gateway.http.parsing.request_parser import parse
from shared.contracts.inference import Endpoint
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest
from shared.errors import InvalidRequest, PayloadTooLarge, QueueFull

BOUNDS = RequestLimits(prompts=4, choices=8, messages=3, content_parts=4, tools=2, stops=3, biases=2)
USER: dict[str, Any] = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER]} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "x"} | fields


@pytest.mark.parametrize(
    ("endpoint", "allowed", "refused", "param"),
    [
        ("completion", completion(prompt=["x"] * 4), completion(prompt=["x"] * 5), "prompt"),
        ("completion", completion(prompt=[[1]] * 4), completion(prompt=[[1]] * 5), "prompt"),
        ("completion", completion(prompt=["x"] * 4, n=2), completion(prompt=["x"] * 4, n=3), "n"),
        ("completion", completion(prompt=["x"], best_of=8), completion(prompt=["x"], best_of=9), "n"),
        ("completion", completion(prompt=[1] * 1000), completion(prompt=[1], n=9), "n"),
        ("embedding", {"model": "m", "input": ["x"] * 4}, {"model": "m", "input": ["x"] * 5}, "input"),
        ("chat", chat(n=8), chat(n=9), "n"),
        ("chat", chat(messages=[USER] * 3), chat(messages=[USER] * 4), "messages"),
        (
            "chat",
            chat(messages=[USER | {"content": [PART] * 2}] * 2),
            chat(messages=[USER | {"content": [PART] * 3}, USER | {"content": [PART] * 2}]),
            "messages",
        ),
        ("chat", chat(tools=[{}] * 2), chat(tools=[{}] * 3), "tools"),
        ("chat", chat(stop=["a", "b"], stop_token_ids=[1]), chat(stop=["a", "b"], stop_token_ids=[1, 2]), "stop"),
        ("chat", chat(logit_bias={"1": 1, "2": 1}), chat(logit_bias={"1": 1, "2": 1, "3": 1}), "logit_bias"),
    ],
)
def test_every_count_has_an_upper_bound(endpoint: Endpoint, allowed: dict[str, Any], refused: dict[str, Any], param: str) -> None:
    BOUNDS.check(parse(endpoint, json.dumps(allowed).encode()).request)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="the limit is") as error:
        BOUNDS.check(parse(endpoint, json.dumps(refused).encode()).request)  # type: ignore[arg-type]
    assert error.value.param == param


@pytest.mark.parametrize(
    ("kind", "field", "value", "most"),
    [
        (ChatCompletionRequest, "messages", [None] * 10_000, 1),
        (CompletionRequest, "prompt", [None] * 10_000, 4),
        (CompletionRequest, "prompt", [[None]] * 10_000, 4),
        (ChatCompletionRequest, "tools", [0] * 10_000, 1),
        (ChatCompletionRequest, "stop_token_ids", ["x"] * 10_000, 1),
        (ChatCompletionRequest, "logit_bias", {str(i): None for i in range(10_000)}, 1),
        (ChatCompletionRequest, "messages", [{"role": "user", "content": [0] * 10_000}], 2),
    ],
)
def test_validation_stops_at_the_first_errors(kind: type[ChatCompletionRequest], field: str, value: Any, most: int) -> None:
    body = {"model": "m", "messages": [USER], "prompt": "x"} | {field: value}
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(json.dumps(body))
    assert error.value.error_count() <= most


TEXT = ',[{"' * 20_000


@pytest.mark.parametrize(
    ("body", "light"),
    [
        (json.dumps(chat(x=TEXT)), True),
        (json.dumps(chat(x=["\\" * 50_000, TEXT])), True),
        (json.dumps(chat(x='\\"' * 50_000)), True),
        (json.dumps(completion(prompt=[1] * 9_000)), True),
        (json.dumps(completion(prompt=[1] * 11_000)), False),
        (json.dumps(completion(x=["a,b"] * 11_000)), False),
        (json.dumps(completion(x={str(i): i for i in range(1_000)}) | {"y": "z" * 20_000}), True),
        (json.dumps(completion(x={str(i): i for i in range(2_000)}) | {"y": "z" * 20_000}), False),
        (json.dumps(completion(x=[[] for _ in range(400)], y="z" * 20_000)), False),
        ("[" * 20_000, False),
        ('"' * 40_000, True),
        ('{"a":"' + "\\\\" * 20_000, True),
        ('{"a":"' + "\\\\" * 20_000 + "\\", True),
        ("," * 20_000, False),
    ],
)
async def test_a_body_of_too_many_values_is_not_parsed(body: str, light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_cost, "SLICE_BYTES", 4096)
    if light:
        await check_json_cost(body.encode(), 10_000)
    else:
        with pytest.raises(PayloadTooLarge, match="THAW_MAX_BODY_VALUES"):
            await check_json_cost(body.encode(), 10_000)


def test_open_requests_are_bounded_in_bytes() -> None:
    admission = Admission(ByteLimits(gateway=100, key=60, model=50))
    with admission.begin("a") as first, admission.begin("a") as second, admission.begin("b") as third:
        first.grow(40)
        first.name_model("m")
        with pytest.raises(QueueFull, match="this API key") as full:
            second.grow(30)
        assert full.value.retry_after_ms
        third.grow(20)
        with pytest.raises(QueueFull, match="requests of m "):
            third.name_model("m")
        third.grow(40)
        with pytest.raises(QueueFull, match="this gateway"):
            second.grow(20)
    assert (admission.total, dict(admission.by_key), dict(admission.by_model)) == (0, {}, {})
    with admission.begin("a") as alone, pytest.raises(PayloadTooLarge):
        alone.grow(61)
    with admission.begin("a") as whole:
        whole.grow(50)
        whole.name_model("m")
        with pytest.raises(PayloadTooLarge):
            whole.grow(1)
