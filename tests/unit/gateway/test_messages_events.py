"""Chat completions become messages of Anthropic's API and their events."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from services.gateway.http.translation.messages import MessageTranslator
from services.gateway.http.translation.messages_request import MessagesRequest

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def translator(**fields: Any) -> MessageTranslator:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | fields
    return MessageTranslator(MessagesRequest.model_validate(asked), "msg_1")


def chunk(finish: str | None = None, stop_reason: Any = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop_reason}], "usage": None}


def stream(*chunks: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a whole stream, each checked against the client's types."""
    made = translator(**fields)
    events = [event for given in chunks for event in made.add(given)] + made.finish()
    for event in events:
        if event["type"] != "ping":
            EVENTS.validate_python(event)
    return events


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_text_has_the_whole_sequence_of_events() -> None:
    events = stream(chunk(role="assistant", content=""), chunk(content="Hé"), chunk(content="y"), chunk("stop"), {"usage": USAGE})
    assert names(events) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert [e["delta"]["text"] for e in events[3:5]] == ["Hé", "y"]
    assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert (events[6]["usage"]["input_tokens"], events[6]["usage"]["cache_read_input_tokens"]) == (4, 3)
    assert events[6]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("finish", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("stop", 2, ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_stop_reason_follows_the_finish_reason(finish: str, stop_reason: Any, expected: tuple[str, str | None]) -> None:
    delta = stream(chunk(content="a"), chunk(finish, stop_reason), stop_sequences=["END"])[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def test_calls_are_blocks_after_the_text() -> None:
    def call(index: int, arguments: str, **start: Any) -> dict[str, Any]:
        name = {"name": start.pop("name")} if "name" in start else {}
        return {"index": index, "function": {"arguments": arguments} | name} | start

    made = translator()
    chunks = (
        chunk(content="so"),
        chunk(tool_calls=[call(0, '{"a":', id="c0", name="f")]),
        chunk(tool_calls=[call(0, "1}")]),
        chunk(tool_calls=[call(1, "", id="c1", name="g")]),
        chunk("tool_calls"),
    )
    events = [event for given in chunks for event in made.add(given)] + made.finish()
    assert [(e["type"].removeprefix("content_block_"), e["index"]) for e in events if "index" in e] == [
        ("start", 0),
        ("delta", 0),
        ("stop", 0),
        ("start", 1),
        ("delta", 1),
        ("delta", 1),
        ("stop", 1),
        ("start", 2),
        ("stop", 2),
    ]
    message = Message.model_validate(made.body())
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert [(b["id"], b["name"], b["input"]) for b in made.body()["content"][1:]] == [("c0", "f", {"a": 1}), ("c1", "g", {})]


def test_arguments_that_were_cut_short_are_empty_and_malformed_ones_fail() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a'}}
    made = translator()
    made.add(chunk(tool_calls=[call]))
    made.add(chunk("length"))
    made.finish()
    assert made.body()["content"][0]["input"] == {}
    made = translator()
    made.add(chunk(tool_calls=[call]))
    made.add(chunk("tool_calls"))
    with pytest.raises(ValueError, match="Unterminated"):
        made.finish()


def test_reasoning_is_a_block_before_the_text() -> None:
    events = stream(chunk(reasoning="hm"), chunk(content="a"), chunk("stop"))
    blocks = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert blocks == ["thinking", "text"]


def test_whole_completion_is_a_message() -> None:
    made = translator()
    message = {"role": "assistant", "content": "a"}
    made.add({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE})
    made.finish()
    parsed = Message.model_validate(made.body())
    assert (parsed.content[0].type, parsed.stop_reason, parsed.usage.output_tokens) == ("text", "end_turn", 2)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("engine_failed", "api_error"),
        ("unavailable", "overloaded_error"),
        ("insufficient_memory", "overloaded_error"),
        ("queue_timeout", "timeout_error"),
        ("insufficient_quota", "rate_limit_error"),
        ("invalid_api_key", "authentication_error"),
        ("context_length_exceeded", "invalid_request_error"),
        ("model_not_found", "not_found_error"),
        ("unknown", "api_error"),
        (None, "api_error"),
    ],
)
def test_failure_is_an_error_event(code: str | None, kind: str) -> None:
    made = translator()
    made.add(chunk(content="a"))
    assert made.fail(code, "gone") == [{"type": "error", "error": {"type": kind, "message": "gone"}}]


def test_end_without_a_reason_is_a_failure() -> None:
    made = translator()
    made.add(chunk(content="a"))
    assert names(made.finish()) == ["error"]
