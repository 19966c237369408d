"""Requests of Anthropic's Messages API become chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.http.translation.messages_request import MessagesRequest, to_chat
from shared.errors import InvalidRequest, ThawError, UnsupportedParameter


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | fields
    parsed: dict[str, Any] = json.loads(to_chat(MessagesRequest.model_validate(asked))[0])
    return parsed


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(messages=list(given), **fields)["messages"]  # type: ignore[no-any-return]


def test_fields_have_the_names_of_chat_completions() -> None:
    given = chat(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        stop_sequences=["\n"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        metadata={"user_id": "u"},
        seed=7,
    )
    assert given == {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "x"}],
        "stop": ["\n"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "u",
        "seed": 7,
    }


def test_images_become_parts() -> None:
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}},
        {"type": "image", "source": {"type": "url", "url": "https://x/y"}},
    ]
    assert messages({"role": "user", "content": blocks})[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image_url", "image_url": {"url": "https://x/y"}},
    ]
    assert messages({"role": "user", "content": blocks[:1]})[0]["content"] == "see"


def test_tool_uses_and_results_become_calls_and_messages_of_the_tool() -> None:
    given = messages(
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "né"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "u"},
                {"type": "text", "text": "and?"},
            ],
        },
    )
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a": "né"}'}}
    assert given == [
        {"role": "assistant", "content": "wait", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "1"},
        {"role": "tool", "tool_call_id": "u", "content": ""},
        {"role": "user", "content": "and?"},
    ]


def test_tools_have_the_form_of_chat() -> None:
    given = chat(tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}])
    assert given["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice_has_the_name_of_chat(choice: dict[str, Any], expected: Any) -> None:
    assert chat(tool_choice=choice)["tool_choice"] == expected
    assert chat(tool_choice=choice | {"disable_parallel_tool_use": True})["parallel_tool_calls"] is False


def test_output_format_becomes_the_response_format() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    assert chat(output_config={"format": form, "effort": "low"}) == chat() | {
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True}},
    }


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, UnsupportedParameter, "thinking"),
        ({"mcp_servers": [{"name": "x"}]}, UnsupportedParameter, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, UnsupportedParameter, "tools[0]"),
        ({"tools": [{"input_schema": {}}]}, InvalidRequest, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, UnsupportedParameter, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, UnsupportedParameter, "output_config.format"),
        ({"system": [{"type": "text"}]}, InvalidRequest, "system[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            UnsupportedParameter,
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 7, "tool_use_id": "t"}]}]},
            InvalidRequest,
            "messages[0].content[0]",
        ),
    ],
)
def test_unsupported_request_is_refused_by_name(fields: dict[str, Any], kind: type[ThawError], param: str) -> None:
    with pytest.raises(kind) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("media_type", ["text/html", "image/", "image/png;x=1", "image/p ng", "", None])
def test_media_type_of_an_image_is_checked(media_type: Any) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": "AA"}}
    with pytest.raises(InvalidRequest) as caught:
        messages({"role": "user", "content": [block]})
    assert caught.value.param == "messages[0].content[0].source.media_type"
