"""A client reassembles the engine's exact output from the events.

Texts and orders are arbitrary.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.http.responses.buffered import BufferedCompletion
from services.gateway.http.responses.event_stream import EventStream, comment
from services.gateway.http.responses.openai_objects import Head
from shared.contracts.inference import InferFinished, Usage
from tests.support.examples import examples

DELTAS = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=6)), max_size=12)
LAST = InferFinished(seq=0, usage=Usage(prompt_tokens=3, completion_tokens=4))


def events_of(data: bytes) -> list[Any]:
    lines = [e for e in data.decode().split("\n\n") if e]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_comment_is_one_line() -> None:
    assert comment("waiting\r\nfor\rdata: {}\n") == b": waiting for data: {}\n\n"


@settings(max_examples=examples(100), deadline=None)
@given(deltas=DELTAS, chat=st.booleans(), token_ids=st.booleans(), usage=st.booleans())
def test_events_rebuild_the_answer(deltas: list[tuple[int, str]], chat: bool, token_ids: bool, usage: bool) -> None:
    kind = "chat.completion" if chat else "text_completion"
    stream = EventStream(
        Head("id", "chat.completion.chunk" if chat else kind, 1, "m"), include_usage=usage, token_ids=token_ids, logprobs=False
    )
    whole = BufferedCompletion(Head("id", kind, 1, "m"), 1, token_ids)
    taken = b""
    for number, (index, text) in enumerate(deltas):
        for sink in (stream, whole):
            sink.chunk([{"index": index, "text": text, "token_ids": [number]}])
        if number % 3 == 0:
            taken += stream.take()
    for sink in (stream, whole):
        sink.chunk([{"index": 0, "text": "", "finish_reason": "length"}])
        sink.on_finished(LAST)
    events = events_of(taken + stream.take())
    if usage:
        last = events.pop()
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)
        assert all(e["usage"] is None for e in events)
    texts: dict[int, str] = {}
    for event in events:
        choice = event["choices"][0]
        piece = choice["delta"].get("content", "") if chat else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + piece
    answer = asyncio.run(whole.body())
    expected = {c["index"]: c["message"]["content"] if chat else c["text"] for c in answer["choices"]}
    assert {i: t for i, t in texts.items() if t} == {i: t for i, t in expected.items() if t}
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    if token_ids:
        ids = [i for e in events for i in e["choices"][0].get("token_ids", ())]
        assert sorted(ids) == list(range(len(deltas)))


@pytest.mark.parametrize("logprobs", [False, True])
def test_first_delta_of_each_chat_choice_has_the_role(logprobs: bool) -> None:
    stream = EventStream(Head("id", "chat.completion.chunk", 1, "m"), include_usage=False, token_ids=False, logprobs=logprobs)
    for index in (1, 0, 1):
        stream.chunk([{"index": index, "text": "x"}])
    stream.on_finished(LAST)
    deltas = [(e["choices"][0]["index"], e["choices"][0]["delta"]) for e in events_of(stream.take())]
    first = {"role": "assistant", "content": "", "refusal": None}
    assert deltas == [(1, first), (1, {"content": "x"}), (0, first), (0, {"content": "x"}), (1, {"content": "x"})]
