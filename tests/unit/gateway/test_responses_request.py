"""Requests of the Responses API become chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.http.translation.responses_request import ResponsesRequest, to_chat
from shared.errors import InvalidRequest, ThawError, UnsupportedParameter


def chat(history: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    body, _ = to_chat(ResponsesRequest.model_validate({"model": "m"} | fields), history or [])
    parsed: dict[str, Any] = json.loads(body)
    return parsed


def messages(given: str | list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return chat(input=given, **fields)["messages"]  # type: ignore[no-any-return]


def test_text_becomes_a_message_of_the_user() -> None:
    assert chat(input="né") == {"model": "m", "messages": [{"role": "user", "content": "né"}]}


def test_fields_have_the_names_of_chat_completions() -> None:
    given = chat(
        input="x",
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        parallel_tool_calls=False,
        reasoning={"effort": "low"},
        top_logprobs=2,
        user="u",
        metadata={"k": "v"},
        store=True,
    )
    assert given["max_tokens"] == 5
    assert (given["temperature"], given["top_p"], given["user"], given["parallel_tool_calls"]) == (0.5, 0.9, "u", False)
    assert given["stream_options"] == {"include_usage": True}
    assert given["reasoning_effort"] == "low"
    assert (given["logprobs"], given["top_logprobs"]) == (True, 2)
    assert given.keys().isdisjoint({"metadata", "store", "input", "max_output_tokens", "reasoning"})


def test_unknown_fields_are_kept_and_replace_no_translated_field() -> None:
    given = chat(input="x", top_k=3, messages=[])
    assert given["top_k"] == 3
    assert given["messages"] == [{"role": "user", "content": "x"}]


def test_instructions_are_merged_with_the_first_system_messages() -> None:
    given = messages(
        [{"role": "developer", "content": "second"}, {"role": "user", "content": "x"}, {"role": "system", "content": "later"}],
        instructions="first",
    )
    assert given == [
        {"role": "system", "content": "first\n\nsecond"},
        {"role": "user", "content": "x"},
        {"role": "system", "content": "later"},
    ]


def test_parts_become_parts_of_chat() -> None:
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
    ]
    assert messages([{"type": "message", "role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
    ]
    assert messages([{"role": "user", "content": parts[:1]}])[0]["content"] == "see"


def test_calls_join_the_assistants_message_and_outputs_follow() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = messages(
        [
            {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
            call,
            call | {"call_id": "d"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "reasoning", "summary": []},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "2"}]},
            call | {"call_id": "e"},
        ]
    )
    assert [m["role"] for m in given] == ["assistant", "tool", "tool", "assistant"]
    assert given[0]["content"] == "wait"
    assert [c["id"] for c in given[0]["tool_calls"]] == ["c", "d"]
    assert given[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert given[2] == {"role": "tool", "tool_call_id": "d", "content": "2"}
    assert given[3]["content"] is None


def test_history_precedes_the_input_and_follows_the_instructions() -> None:
    history = [{"role": "user", "content": "1"}, {"type": "message", "role": "assistant", "content": "2"}]
    request = ResponsesRequest.model_validate({"model": "m", "input": "3", "instructions": "i"})
    body, client_request = to_chat(request, history)
    assert [m["content"] for m in json.loads(body)["messages"]] == ["i", "1", "2", "3"]
    assert client_request.items == (*history, {"role": "user", "content": "3"})


def test_tools_and_choice_have_the_form_of_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True, "description": None}
    given = chat(input="x", tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert given["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    assert given["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert chat(input="x", tool_choice="required")["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"type": "json_object"}),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
        ),
    ],
)
def test_text_format_becomes_the_response_format(text: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert chat(input="x", text=text).get("response_format") == expected


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"background": True}, UnsupportedParameter, "background"),
        ({"conversation": "c"}, UnsupportedParameter, "conversation"),
        ({"prompt": {"id": "p"}}, UnsupportedParameter, "prompt"),
        ({"truncation": "auto"}, UnsupportedParameter, "truncation"),
        ({"tools": [{"type": "web_search"}]}, UnsupportedParameter, "tools[0]"),
        ({"tool_choice": {"type": "file_search"}}, UnsupportedParameter, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, UnsupportedParameter, "text.format"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, UnsupportedParameter, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, UnsupportedParameter, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [None]}]}, UnsupportedParameter, "input[0].content[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, InvalidRequest, "input[0]"),
        ({"input": [{"role": "user", "content": 7}]}, InvalidRequest, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, InvalidRequest, "input[0].arguments"),
        ({"input": []}, InvalidRequest, "input"),
    ],
)
def test_unsupported_request_is_refused_by_name(fields: dict[str, Any], kind: type[ThawError], param: str) -> None:
    with pytest.raises(kind) as caught:
        chat(**({"input": "x"} | fields))
    assert caught.value.param == param
