"""Requests of Ollama's API become OpenAI's, which the gateway validates as usual."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from services.gateway.domain.body_outline import CELL_BYTES, JsonOutline
from services.gateway.http.parsing.request_parser import parse
from services.gateway.http.translation.ollama_requests import TranslatedRequest, translate_request
from shared.errors import InvalidRequest, UnsupportedParameter

PNG = "iVBORw0KGgo="


def translate(route: str, **fields: Any) -> TranslatedRequest:
    """Translate a request, which must be valid in OpenAI's form too."""
    translated = translate_request(route, json.dumps({"model": "m:latest", **fields}).encode())
    parse(translated.endpoint, translated.body)
    return translated


def body(route: str, **fields: Any) -> dict[str, Any]:
    translated: dict[str, Any] = json.loads(translate(route, **fields).body)
    return translated


def message(content: Any = "Hi", role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | fields


def test_a_chat_streams_unless_the_client_refuses() -> None:
    streamed = body("/api/chat", messages=[message()])
    assert streamed == {"model": "m", "messages": [message()], "stream": True, "stream_options": {"include_usage": True}}
    assert body("/api/chat", messages=[message()], stream=False) == {"model": "m", "messages": [message()]}


def test_options_get_their_names_and_those_without_effect_are_listed() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "num_predict": 9, "stop": ["x"],
        "repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "num_ctx": 4096, "mirostat": 0, "num_gpu": None,
    }  # fmt: skip
    translated = translate("/api/chat", messages=[message()], stream=False, options=options)
    assert json.loads(translated.body) == {
        "model": "m", "messages": [message()],
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "max_tokens": 9, "stop": ["x"],
        "repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2,
    }  # fmt: skip
    assert translated.reply.ignored == ("options.num_ctx", "options.mirostat")


@pytest.mark.parametrize("unlimited", [-2, -1, 0])
def test_no_limit_of_tokens_is_sent_for_an_unlimited_prediction(unlimited: int) -> None:
    assert "max_tokens" not in body("/api/chat", messages=[message()], options={"num_predict": unlimited})


@pytest.mark.parametrize(("name", "value"), [("mirostat", 1), ("typical_p", 0.5), ("tfs_z", 0.5)])
def test_an_option_that_would_change_the_output_is_refused(name: str, value: float) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        translate("/api/chat", messages=[message()], options={name: value})
    assert caught.value.param == f"options.{name}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("json", {"type": "json_object"}),
        (
            {"type": "object"},
            {"type": "json_schema", "json_schema": {"name": "format", "schema": {"type": "object"}, "strict": True}},
        ),
        ("", None),
        (None, None),
    ],
)
def test_a_format_becomes_a_response_format(given: Any, expected: Any) -> None:
    assert body("/api/chat", messages=[message()], format=given).get("response_format") == expected


def test_images_become_content_parts() -> None:
    [sent] = body("/api/chat", messages=[message("What?", images=[PNG, "/9j/4AAQ"])])["messages"]
    assert sent["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/4AAQ"}},
    ]


def test_image_of_a_data_url_keeps_its_type() -> None:
    url = f"data:image/webp;base64,{PNG}"
    assert body("/api/generate", prompt="", images=[url])["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}}
    ]


@pytest.mark.parametrize("data", ["data:text/html;base64,AA", "data:image/png,AA", "data:image/p g;base64,AA", "data:"])
def test_data_url_of_no_image_is_refused(data: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body("/api/chat", messages=[message("What?", images=[PNG, data])])
    assert caught.value.param == "images[1]"


@pytest.mark.parametrize(
    ("start", "kind"), [("iVBORw0KGgo", "png"), ("\\/9j\\/4AAQ", "jpeg"), ("R0lGOD", "gif"), ("UklGR", "webp")]
)
def test_type_of_an_image_is_found_in_an_outline(start: str, kind: str) -> None:
    """Its string begins with a cell of base64, so that the outline cuts out the most it can."""
    before = '{"messages":[{"role":"user","content":"","images":["'
    asked = " " * (CELL_BYTES - len(before)) + before + start + "QUJD" * CELL_BYTES + '"]}],"model":"m"}'
    outline = JsonOutline("thaw0123456789abcdef")
    outline.feed(asked.encode())
    outline.finish()
    [part] = json.loads(translate_request("/api/chat", bytes(outline.kept)).body)["messages"][0]["content"]
    assert re.match(rf"data:image/{kind};base64,[^:]{{14,16}}thaw0123456789abcdefp0p", part["image_url"]["url"])


def test_results_of_tools_answer_the_calls_in_their_order() -> None:
    def call(name: str, **arguments: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": arguments}}

    messages = [
        message(),
        message("", "assistant", tool_calls=[call("add", a=1), call("add", a=2), call("now")]),
        message("later", "tool", tool_name="now"),
        message("1", "tool", tool_name="add"),
        message("2", "tool"),
    ]
    sent = body("/api/chat", messages=messages, tools=[{"type": "function", "function": {"name": "add"}}])
    calls = sent["messages"][1]["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "add", {"a": 1}),
        ("function", "add", {"a": 2}),
        ("function", "now", {}),
    ]
    assert [m["tool_call_id"] for m in sent["messages"][2:]] == [calls[2]["id"], calls[0]["id"], calls[1]["id"]]
    assert sent["tools"] == [{"type": "function", "function": {"name": "add"}}]


def test_a_prompt_becomes_a_chat_unless_it_is_raw_or_has_a_suffix() -> None:
    chat = translate("/api/generate", prompt="Hi", system="Be brief", stream=False)
    assert (chat.endpoint, json.loads(chat.body)["messages"]) == ("chat", [message("Be brief", "system"), message()])
    raw = translate("/api/generate", prompt="Hi", raw=True, stream=False)
    assert (raw.endpoint, json.loads(raw.body)) == ("completion", {"model": "m", "prompt": "Hi", "max_tokens": None})
    infill = translate("/api/generate", prompt="def f(", suffix="return x")
    assert (infill.endpoint, json.loads(infill.body)["suffix"]) == ("completion", "return x")
    limited = translate("/api/generate", prompt="Hi", raw=True, options={"num_predict": 3})
    assert json.loads(limited.body)["max_tokens"] == 3


@pytest.mark.parametrize(
    "fields", [{"template": "{{ .Prompt }}"}, {"context": [1, 2]}, {"raw": True, "system": "x"}, {"raw": True, "images": [PNG]}]
)
def test_a_parameter_without_equivalent_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        translate("/api/generate", prompt="Hi", **fields)


@pytest.mark.parametrize(
    ("route", "fields", "endpoint"),
    [
        ("/api/chat", {"messages": []}, "completion"),
        ("/api/chat", {}, "completion"),
        ("/api/generate", {}, "completion"),
        ("/api/generate", {"prompt": ""}, "completion"),
        ("/api/embed", {"input": []}, "embedding"),
        ("/api/embeddings", {}, "embedding"),
    ],
)
def test_a_request_without_a_prompt_wakes_the_model(route: str, fields: dict[str, Any], endpoint: str) -> None:
    translated = translate(route, **fields)
    assert translated.reply.is_load
    assert translated.endpoint == endpoint
    for keep_alive in (0, "0", "0s", "0.0m"):
        with pytest.raises(InvalidRequest, match="thaw sleep m"):
            translate(route, **fields, keep_alive=keep_alive)
    assert translate(route, **fields, keep_alive="10m").reply.is_load


def test_embeddings_are_requested_in_base64() -> None:
    many = {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}
    assert body("/api/embed", input=["a", "b"], dimensions=8, truncate=True) == many
    assert body("/api/embeddings", prompt="a") == {"model": "m", "input": "a", "encoding_format": "base64"}


def test_thinking_and_log_probabilities_are_passed_on() -> None:
    assert body("/api/chat", messages=[message()], think=False)["chat_template_kwargs"] == {"enable_thinking": False}
    assert body("/api/chat", messages=[message()], think="low")["reasoning_effort"] == "low"
    assert body("/api/chat", messages=[message()], logprobs=True, top_logprobs=2)["top_logprobs"] == 2
    assert body("/api/generate", prompt="x", raw=True, logprobs=True)["logprobs"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "x"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}], "options": {"temperature": "hot"}}, "temperature"),
        ({"messages": [{"role": "user", "content": "x"}], "options": {"num_predict": "many"}}, "max_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls"),
        ({"messages": [], "model": ""}, "model"),
    ],
)
def test_an_invalid_request_names_its_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translate("/api/chat", **fields)
    assert caught.value.param == param
