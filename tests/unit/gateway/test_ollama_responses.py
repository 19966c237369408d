"""Responses in OpenAI's form become Ollama's."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.translation.ollama_models import format_count
from services.gateway.http.translation.ollama_requests import Kind, OllamaReply
from services.gateway.http.translation.ollama_responses import OllamaTranslator, error_text
from services.gateway.http.translation.vectors import cosine_similarity, normalize

USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}], "usage": None})


def ending(finish: str = "stop") -> bytes:
    return delta(finish) + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


def translator(kind: Kind = "chat", **fields: Any) -> OllamaTranslator:
    return OllamaTranslator(OllamaReply(kind, "m", **fields), 0.0)


def lines(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [i["message"]["content"] for i in items]


async def test_a_stream_becomes_lines_with_durations_at_the_end() -> None:
    t = translator()
    t.on_headers("queue;dur=1000.0, prefill;dur=500.0, mesh;dur=2.0")
    first = lines(t.feed(b": waking\n\n" + delta(role="assistant", content="") + delta(content="né"), 2.0))
    assert [(i["model"], i["message"], i["done"]) for i in first] == [("m", {"role": "assistant", "content": "né"}, False)]
    *more, last = lines(t.feed(delta(content="!") + ending("length"), 5.0))
    assert texts(more) == ["!"]
    assert last.pop("created_at")
    assert last == {
        "model": "m",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "length",
        "total_duration": 5_000_000_000,
        "load_duration": 1_500_000_000,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 2,
        "eval_duration": 3_000_000_000,
    }
    assert await t.end(6.0) == b""


async def test_tokens_that_arrive_at_once_took_some_time() -> None:
    t = translator()
    last = lines(t.feed(delta(content="né") + ending("length"), 2.0))[-1]
    assert (last["eval_count"], last["eval_duration"]) == (2, 1)
    assert last["total_duration"] == last["load_duration"] + last["prompt_eval_duration"] + 1


@given(st.lists(st.integers(1, 200), max_size=20), st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_may_be_cut_anywhere(cuts: list[int], newline: bytes) -> None:
    stream = (delta(content="né") + b"event: x\n: y\n\n" + delta(content="日本") + ending()).replace(b"\n", newline)
    t, out, at = translator(), b"", 0
    for cut in cuts:
        out += t.feed(stream[at : at + cut], 1.0)
        at += cut
    out += t.feed(stream[at:], 1.0) + asyncio.run(t.end(1.0))
    assert texts(lines(out)) == ["né", "日本", ""]


def test_generation_has_a_response_instead_of_a_message() -> None:
    chunk = event({"choices": [{"index": 0, "text": "Hi", "finish_reason": None}]})
    end = event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}) + b"data: [DONE]\n\n"
    items = lines(translator("generate").feed(chunk + end, 1.0))
    assert [(i["response"], i["done"]) for i in items] == [("Hi", False), ("", True)]


def test_tool_calls_are_sent_whole() -> None:
    def part(index: int, arguments: str, **fields: Any) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments} | fields.pop("function", {})} | fields

    stream = (
        delta(tool_calls=[part(0, "", id="a", function={"name": "add"})])
        + delta(tool_calls=[part(0, '{"a": ')])
        + delta(tool_calls=[part(0, "1}")])
        + delta(tool_calls=[part(1, "{}", id="b", function={"name": "now"})])
        + ending("tool_calls")
    )
    calls, last = lines(translator().feed(stream, 1.0))
    assert calls["message"]["tool_calls"] == [
        {"id": "a", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}},
        {"id": "b", "function": {"index": 1, "name": "now", "arguments": {}}},
    ]
    assert (calls["done"], last["done"], last["done_reason"]) == (False, True, "stop")


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]"])
def test_unusable_arguments_of_a_tool_are_an_error(arguments: str) -> None:
    stream = delta(tool_calls=[{"index": 0, "function": {"name": "add", "arguments": arguments}}]) + ending("tool_calls")
    [error] = lines(translator().feed(stream, 1.0))
    assert "not a JSON object" in error["error"]


@pytest.mark.parametrize("error", [{"error": "gone"}, {"error": {"message": "gone", "type": "x"}}])
async def test_an_error_in_the_stream_is_its_last_line(error: dict[str, Any]) -> None:
    t = translator()
    *_, last = lines(t.feed(delta(content="x") + event(error) + delta(content="y"), 1.0))
    assert last == {"error": "gone"}
    assert await t.end(1.0) == b""


async def test_a_stream_that_breaks_off_says_so() -> None:
    t = translator()
    t.feed(delta(content="x"), 1.0)
    assert lines(await t.end(1.0)) == [{"error": "The response broke off"}]


def test_thinking_and_log_probabilities_have_their_fields() -> None:
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}]}
    chunk = event({"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": logprobs}]})
    thought, token, *_ = lines(translator().feed(delta(reasoning_content="hm") + chunk + ending(), 1.0))
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert token["logprobs"] == logprobs["content"]


async def test_whole_responses() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    status, answer = await translator().translate_body(200, json.dumps({"choices": [choice], "usage": USAGE}).encode(), 2.0)
    assert (status, answer["message"], answer["done"], answer["done_reason"]) == (
        200,
        {"role": "assistant", "content": "Hi"},
        True,
        "stop",
    )
    assert (answer["total_duration"], answer["prompt_eval_count"], answer["eval_count"]) == (2_000_000_000, 7, 2)
    text = {"index": 0, "text": ".", "finish_reason": "length"}
    status, answer = await translator("chat", is_load=True).translate_body(
        200, json.dumps({"choices": [text], "usage": USAGE}).encode(), 2.0
    )
    assert (answer["message"]["content"], answer["done_reason"]) == ("", "load")


@pytest.mark.parametrize("encode", [lambda v: base64.b64encode(struct.pack("<2f", *v)).decode(), list])
async def test_embeddings_have_length_one(encode: Any) -> None:
    data = [{"index": i, "embedding": encode(v)} for i, v in enumerate([(3.0, 4.0), (0.0, 0.0)])]
    given = json.dumps({"data": data, "usage": {"prompt_tokens": 7}}).encode()
    status, answer = await translator("embed").translate_body(200, given, 1.0)
    assert (status, answer["model"], answer["prompt_eval_count"]) == (200, "m", 7)
    assert answer["embeddings"] == [pytest.approx([0.6, 0.8]), [0.0, 0.0]]
    assert (await translator("embeddings").translate_body(200, given, 1.0))[1] == {"embedding": [3.0, 4.0]}
    assert (await translator("embed", is_load=True).translate_body(200, given, 1.0))[1]["embeddings"] == []
    assert (await translator("embeddings", is_load=True).translate_body(200, given, 1.0))[1] == {"embedding": []}


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, b'{"error": {"message": "too long"}}', (400, {"error": "too long"})),
        (500, b"<html>", (500, {"error": "The engine answered with status 500"})),
        (200, b"<html>", (502, {"error": "The engine answered with status 200"})),
    ],
)
async def test_errors_of_engines_become_text(status: int, body: bytes, expected: tuple[int, dict[str, Any]]) -> None:
    assert await translator().translate_body(status, body, 1.0) == expected


@pytest.mark.parametrize("kind", ["chat", "generate", "embed", "embeddings"])
@pytest.mark.parametrize(
    "body",
    [b'{"data": [{}], "choices": [{"message": 1, "logprobs": 1}]}', b'{"data": 1, "choices": [{"message": {"tool_calls": 3}}]}'],
)
async def test_malformed_responses_are_errors(kind: Kind, body: bytes) -> None:
    assert await translator(kind).translate_body(200, body, 1.0) == (502, {"error": "The engine sent a malformed response"})


@pytest.mark.parametrize("malformed", [b"data: {\n\n", event([1]), event({"choices": [{"delta": {"tool_calls": 3}}]})])
async def test_malformed_event_ends_the_stream(malformed: bytes) -> None:
    t = translator()
    *_, last = lines(t.feed(delta(content="x") + malformed + delta(content="y"), 1.0))
    assert last == {"error": "The engine sent a malformed response"}
    assert await t.end(1.0) == b""


def test_error_text_of_other_forms() -> None:
    assert error_text({"message": "x"}, 400) == "x"
    assert error_text({"detail": "y"}, 400) == "y"
    assert error_text(None, 400) == "The engine answered with status 400"


@pytest.mark.parametrize(
    ("count", "text"), [(7_615_616_512, "7.6B"), (134_515_008, "134.52M"), (1_000_000_000, "1B"), (512, "512")]
)
def test_numbers_of_parameters(count: int, text: str) -> None:
    assert format_count(count) == text


def test_cosine_similarity_and_length() -> None:
    assert cosine_similarity([1, 0], [0, 2]) == 0
    assert cosine_similarity([1, 1], [2, 2]) == pytest.approx(1)
    assert cosine_similarity([1, 0], [-3, 0]) == -1
    assert cosine_similarity([0, 0], [1, 1]) == 0
    assert normalize([0.0, 0.0]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="dimensions"):
        cosine_similarity([1], [1, 2])
