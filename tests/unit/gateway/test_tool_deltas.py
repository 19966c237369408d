"""Tool calls of chat completions: stream and whole body agree, and replays repeat nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.http.responses.buffered import BufferedCompletion
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.http.responses.tool_deltas import tool_options_of
from shared.contracts.engines import ToolFormat
from shared.contracts.inference import InferFinished, InferStarted, Usage
from shared.contracts.openai import ChatCompletionRequest
from tests.support.examples import examples

LAST = InferFinished(seq=0, usage=Usage(prompt_tokens=3, completion_tokens=4))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'
TEXT = f"Now.\n{CALL}\n{CALL}"


def request(**body: Any) -> ChatCompletionRequest:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": tools, **body}
    return ChatCompletionRequest.model_validate(asked)


def started(form: ToolFormat | None) -> InferStarted:
    return InferStarted(prompt_tokens=3, tool_format=form)


def stream(*, is_repeatable: bool = False, token_ids: bool = False, logprobs: bool = False, **body: Any) -> EventStream:
    return EventStream(
        Head("id", "chat.completion.chunk", 1, "m"),
        include_usage=False,
        token_ids=token_ids,
        logprobs=logprobs,
        is_repeatable=is_repeatable,
        tools=tool_options_of(request(**body)),
    )


def choices_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:])["choices"][0] for line in data.decode().split("\n") if line.startswith("data: {")]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the deltas of a stream together, as clients do."""
    content, calls = "", list[dict[str, Any]]()
    for choice in choices:
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                assert delta.keys() == {"index", "id", "type", "function"}
                assert delta["function"]["arguments"] == ""
                calls.append({name: delta[name] for name in ("id", "type")} | {"function": dict(delta["function"])})
            else:
                assert delta.keys() == {"index", "function"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls}


def whole(form: ToolFormat | None, reason: str = "stop", **body: Any) -> dict[str, Any]:
    sink = BufferedCompletion(Head("id", "chat.completion", 1, "m"), 1, False, tool_options_of(request(**body)))
    sink.on_started(started(form))
    sink.chunk([{"index": 0, "text": TEXT, "finish_reason": reason}])
    sink.on_finished(LAST)
    choice: dict[str, Any] = asyncio.run(sink.body())["choices"][0]
    return choice


@settings(max_examples=examples(60), deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(TEXT)), max_size=8).map(sorted),
    restart=st.none() | st.integers(0, len(TEXT)),
    full=st.booleans(),
)
def test_stream_and_body_agree_and_a_restart_repeats_nothing(cuts: list[int], restart: int | None, full: bool) -> None:
    sink = stream(is_repeatable=True, token_ids=full)
    data = b""
    if restart is not None and not full:  # a stream with token ids is not restarted
        sink.on_started(started("hermes"))
        sink.chunk([{"index": 0, "text": TEXT[:restart]}])
        data = sink.take()
        sink.reset()
    sink.on_started(started("hermes"))
    for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(TEXT)], strict=True)):
        sink.chunk([{"index": 0, "text": TEXT[a:b], "token_ids": [number]}])
    sink.chunk([{"index": 0, "text": "", "finish_reason": "stop"}])
    sink.on_finished(LAST)
    choices = choices_of(data + sink.take())
    expected = whole("hermes")
    assert joined(choices) == {name: expected["message"][name] for name in ("content", "tool_calls")}
    assert (
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [expected["finish_reason"]] == ["tool_calls"]
    )
    if full:
        assert [t for choice in choices for t in choice.get("token_ids", ())] == list(range(len(cuts) + 1))


def test_log_probabilities_keep_their_tokens() -> None:
    sink = stream(logprobs=True)
    sink.on_started(started("hermes"))
    for char in CALL:
        sink.chunk([{"index": 0, "text": char, "logprobs": [{"token": char, "logprob": -1.0}]}])
    tokens = [t["token"] for c in choices_of(sink.take()) for t in (c["logprobs"] or {}).get("content") or ()]
    assert "".join(tokens) == CALL


def test_calls_have_ids_of_their_own() -> None:
    calls = whole("hermes")["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    assert calls == whole("hermes")["message"]["tool_calls"]


@pytest.mark.parametrize(("form", "body"), [(None, {}), ("hermes", {"tool_choice": "none"}), ("hermes", {"tools": None})])
def test_text_stays_text_where_no_calls_are_expected(form: ToolFormat | None, body: dict[str, Any]) -> None:
    choice = whole(form, **body)
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")
    assert "tool_calls" not in choice["message"]


def test_finish_reasons() -> None:
    assert whole("hermes")["finish_reason"] == "tool_calls"
    assert whole("hermes", "length")["finish_reason"] == "length"
    assert len(whole("hermes", parallel_tool_calls=False)["message"]["tool_calls"]) == 1
