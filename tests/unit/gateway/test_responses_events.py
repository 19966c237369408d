"""Chat completions become responses and their events."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.http.translation.responses import ResponseTranslator
from services.gateway.http.translation.responses_request import ResponsesRequest

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


def translator(**fields: Any) -> ResponseTranslator:
    request = ResponsesRequest.model_validate({"model": "m", "input": "x"} | fields)
    return ResponseTranslator(request, "resp_1", 100, is_stored=False)


def chunk(finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return {"created": 50, "choices": [choice], "usage": None}


def stream(*chunks: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a whole stream, each checked against the client's types."""
    made = translator(**fields)
    events = [event for given in chunks for event in made.add(given)] + made.finish()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    return events


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text_has_the_whole_sequence_of_events() -> None:
    events = stream(chunk(role="assistant", content=""), chunk(content="Hé"), chunk(content="y"), chunk("stop"), {"usage": USAGE})
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [e["delta"] for e in events if "delta" in e] == ["Hé", "y"]
    assert events[6]["text"] == "Héy"
    assert events[3]["part"]["text"] == ""
    assert events[0]["response"]["status"] == "in_progress"
    response = Response.model_validate(events[-1]["response"])
    assert (response.output_text, response.status, response.created_at) == ("Héy", "completed", 50)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 2, 9)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens_details.reasoning_tokens == 1
    assert len({e["item_id"] for e in events if "item_id" in e} | {response.output[0].id}) == 1


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_response_cut_short_is_incomplete(finish: str, reason: str) -> None:
    last = stream(chunk(content="a"), chunk(finish))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": reason}
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_calls_follow_the_text_and_keep_their_deltas_apart() -> None:
    def call(index: int, arguments: str, **start: Any) -> dict[str, Any]:
        name = {"name": start.pop("name")} if "name" in start else {}
        return {"index": index, "function": {"arguments": arguments} | name} | start

    events = stream(
        chunk(content="so"),
        chunk(tool_calls=[call(0, "", id="c0", name="f")]),
        chunk(tool_calls=[call(0, '{"a"'), call(1, "{", id="c1", name="g")]),
        chunk(tool_calls=[call(0, ":1}"), call(1, "}")]),
        chunk("tool_calls"),
    )
    assert names(events)[5:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "output_item.added",
        *["function_call_arguments.delta"] * 3,
        *["function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert [(i["call_id"], i["name"], i["arguments"]) for i in output[1:]] == [("c0", "f", '{"a":1}'), ("c1", "g", "{}")]
    assert [e["output_index"] for e in events if "arguments.delta" in e["type"]] == [1, 2, 1, 2]


def test_reasoning_is_an_item_before_the_message() -> None:
    events = stream(chunk(reasoning_content="hm"), chunk(content="a"), chunk("stop"))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert names(events)[4:8] == ["reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"]


def test_log_probabilities_are_in_deltas_and_in_the_part() -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}
    events = stream(chunk(content="a", logprobs={"content": [token]}), chunk("stop"), top_logprobs=1)
    assert [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"] == [[token]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [token]


def test_whole_completion_has_the_same_response_as_its_stream() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    made = translator(metadata={"k": "v"}, tools=[{"type": "function", "name": "f"}])
    made.add({"created": 50, "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": USAGE})
    made.finish()
    streamed = stream(
        chunk(content="a"),
        chunk("tool_calls", tool_calls=[call | {"index": 0}]),
        {"choices": [], "usage": USAGE},
        metadata={"k": "v"},
        tools=[{"type": "function", "name": "f"}],
    )
    assert made.body() == streamed[-1]["response"]
    assert Response.model_validate(made.body()).metadata == {"k": "v"}


def test_response_without_text_has_an_empty_message() -> None:
    last = stream(chunk(content=""), chunk("stop"))[-1]
    assert [item["content"][0]["text"] for item in last["response"]["output"]] == [""]


def test_failure_reports_the_error_in_the_last_event() -> None:
    made = translator()
    made.add(chunk(content="a"))
    [last] = made.fail("engine_failed", "gone")
    EVENTS.validate_python(last | {"response": last["response"] | {"error": None}})
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "engine_failed", "message": "gone"}
    assert names(translator().fail(None, "early")) == ["created", "in_progress", "failed"]


def test_end_without_a_reason_is_a_failure() -> None:
    made = translator()
    made.add(chunk(content="a"))
    assert names(made.finish()) == ["failed"]
