"""Tool calls of the builtin engine through a real mesh, with the real client of each API.

The model has random weights: only grammars make its calls valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.support.launcher import Thaw

SHARED = True
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "news", "parameters": PARAMETERS}},
]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "news"}}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, Any] = {"model": "one", "temperature": 0, "messages": HELLO, "max_tokens": 400}


def ask(client: openai.OpenAI, **body: Any) -> Any:
    """Return the only choice of a chat completion."""
    (choice,) = client.chat.completions.create(**ASKED | body).choices
    return choice


def check(arguments: Any) -> None:
    assert arguments["place"] in ("Bern", "Rome")
    assert 1 <= arguments["days"] <= 9


def test_named_tool_is_called_and_its_result_continues_the_chat(client: openai.OpenAI) -> None:
    choice = ask(client, tools=TOOLS, tool_choice=NAMED)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "news"
    check(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "no news"}
    messages = [*HELLO, choice.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**ASKED | {"messages": messages, "max_tokens": 4}, tools=TOOLS)
    assert after.choices[0].finish_reason == "length"


def test_stream_has_the_deltas_of_openai(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    first, rest = deltas[0], deltas[1:]
    assert (first.index, first.type, first.function and first.function.arguments) == (0, "function", "")
    assert first.id
    assert all(d.index == 0 and d.id is None and d.function is not None and d.function.name is None for d in rest)
    assert len(rest) > 2
    arguments = "".join(d.function.arguments or "" for d in rest if d.function is not None)
    check(json.loads(arguments))
    assert whole is not None
    assert whole[0].type == "function"
    assert first.function is not None
    assert (whole[0].function.name, whole[0].function.arguments) == (first.function.name, arguments)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert not "".join(chunk.delta.content or "" for chunk in chunks)


def test_stream_helper_and_parse_return_the_arguments_as_objects(client: openai.OpenAI) -> None:
    class Weather(BaseModel):
        days: int = Field(ge=1, le=9)

    tools = [openai.pydantic_function_tool(Weather)]
    asked: dict[str, Any] = {**ASKED, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls
    assert parsed is not None
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed is not None
    assert isinstance(parsed[0].function.parsed_arguments, Weather)
    assert streamed[0].function.parsed_arguments == parsed[0].function.parsed_arguments
    assert "tool_calls.function.arguments.done" in {event.type for event in events}


def test_auto_leaves_text_alone_and_holds_strict_tools_to_their_schema(client: openai.OpenAI) -> None:
    short = {"max_tokens": 8}
    free = ask(client, **short, tools=TOOLS)
    assert free.message.content
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    assert ask(client, **short, tools=strict).finish_reason in ("length", "tool_calls")
    formatted: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    answer = ask(client, tools=TOOLS, response_format=formatted).message
    check(json.loads(answer.content) if answer.content else json.loads(answer.tool_calls[0].function.arguments))


def test_bad_tools_are_refused_by_name(plain: openai.OpenAI) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tools", {"tools": [TOOLS[0], TOOLS[0]]}),
        ("tools", {"tools": [_with_schema({"type": "objec"})], "tool_choice": "required"}),
        ("tools", {"tools": [_with_schema({"$ref": "#"})], "tool_choice": "required"}),
    ]
    for param, body in bad:
        with pytest.raises(openai.BadRequestError) as refused:
            plain.chat.completions.create(**ASKED, **body)
        assert refused.value.param == param, body


def _with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_anthropic_client_gets_tool_use_and_sends_results(mesh: Thaw) -> None:
    tools: Any = [{"name": "weather", "description": "Forecast", "input_schema": PARAMETERS}]
    with anthropic.Anthropic(base_url=mesh.url, api_key="none", timeout=120) as client:
        asked: dict[str, Any] = {"model": "one", "messages": HELLO, "max_tokens": 400, "tools": tools}
        asked |= {"tool_choice": {"type": "tool", "name": "weather"}, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
        assert [block.type for block in whole.content] == [block.type for block in streamed.content] == ["tool_use"]
        check(whole.content[0].input)
        assert streamed.content[0].input == whole.content[0].input
        assert events.count("input_json") > 2
        result: Any = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "rain"}
        messages = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        asked |= {"messages": messages, "max_tokens": 4, "tool_choice": {"type": "auto"}}
        assert client.messages.create(**asked).stop_reason == "max_tokens"


def test_responses_have_function_calls(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    asked: dict[str, Any] = {"model": "one", "temperature": 0, "input": "Hello", "max_output_tokens": 400, "tools": tools}
    asked |= {"tool_choice": {"type": "function", "name": "weather"}}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_response()
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather"]
    check(json.loads(calls[0].arguments))
    assert [item.arguments for item in streamed.output if item.type == "function_call"] == [calls[0].arguments]
    assert events.count("response.function_call_arguments.delta") > 2
    assert "response.function_call_arguments.done" in events
    output: Any = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}]
    after = {"model": "one", "input": output, "previous_response_id": whole.id, "max_output_tokens": 4, "tools": tools}
    assert client.responses.create(**after).status == "incomplete"


FAMILIES = ("qwen3_coder", "deepseek_v31", "functiongemma", "pythonic")


@pytest.fixture(scope="module")
def families(mesh: Thaw) -> Iterator[dict[str, str]]:
    """Register the model `one` under a name for each family. Its template renders the tools."""
    headers = {"authorization": f"Bearer {mesh.endpoints['admin_key']}"}
    source = str(mesh.home / "models" / "one")
    names = {family: f"calls-{family.replace('_', '-')}" for family in FAMILIES}
    specs = [
        {"name": name, "source": source, "isolation": "shared", "engine_args": {"tool_call_parser": family}}
        for family, name in names.items()
    ]
    with httpx.Client(base_url=f"{mesh.url}/admin/v1", headers=headers, timeout=120) as admin:
        admin.post("/models", json={"specs": specs}).raise_for_status()
        yield names
        for name in names.values():
            admin.delete(f"/models/{name}").raise_for_status()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_notation_gives_the_calls_of_openai(client: openai.OpenAI, families: dict[str, str], family: str) -> None:
    asked: dict[str, Any] = {**ASKED, "model": families[family], "tools": TOOLS, "tool_choice": NAMED, "seed": 5}
    choice = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "news"
    check(json.loads(call.function.arguments))
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert [delta.function.name for delta in deltas if delta.function and delta.function.name] == ["news"]
    assert "".join(delta.function.arguments or "" for delta in deltas if delta.function) == call.function.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
