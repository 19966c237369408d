"""A restarted response reaches the client as one response, or as an error.

The parts may be split in any way.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.failover import MAX_ENGINE_DEATHS
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.requests.sink import Diverged
from shared.contracts.inference import InferFinished, Usage
from shared.errors import EngineFailed
from tests.support.examples import examples
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

LAST = InferFinished(seq=0, usage=Usage(prompt_tokens=3, completion_tokens=4))
CUTS = st.lists(st.integers(1, 5), max_size=12)


def stream() -> EventStream:
    head = Head("id", "chat.completion.chunk", 1, "m")
    return EventStream(head, include_usage=False, token_ids=False, logprobs=False, is_repeatable=True)


def pieces(text: str, cuts: list[int]) -> list[str]:
    found, rest = [], text
    for cut in cuts:
        found.append(rest[:cut])
        rest = rest[cut:]
    return [*found, rest]


def content_of(data: bytes) -> str:
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events)


def finish(sink: EventStream) -> None:
    sink.chunk([{"index": 0, "text": "", "finish_reason": "stop"}])
    sink.on_finished(LAST)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=30), breaks=st.lists(st.integers(0, 12), max_size=3), first=CUTS, again=CUTS)
def test_restarted_response_reaches_the_client_as_one_answer(
    text: str, breaks: list[int], first: list[int], again: list[int]
) -> None:
    sink, data = stream(), b""
    for number, until in enumerate(breaks):
        for piece in pieces(text, first if number % 2 else again)[:until]:
            sink.chunk([{"index": 0, "text": piece}])
        data += sink.take()
        sink.reset()
    for piece in pieces(text, again):
        sink.chunk([{"index": 0, "text": piece}])
    finish(sink)
    data += sink.take()
    assert content_of(data) == text
    assert data.count(b'"finish_reason":"stop"') == 1
    assert data.count(b'"role"') == 1


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(min_size=1, max_size=20), other=st.text(max_size=20), cuts=CUTS)
def test_diverging_response_is_detected_before_any_output_is_sent(text: str, other: str, cuts: list[int]) -> None:
    assume(not other.startswith(text))
    sink = stream()
    sink.chunk([{"index": 0, "text": text}])
    sink.take()
    sink.reset()
    with pytest.raises(Diverged):  # noqa: PT012 - at the latest when it ends
        for piece in pieces(other, cuts):
            sink.chunk([{"index": 0, "text": piece}])
        finish(sink)
    assert content_of(sink.take()) == ""


@pytest.mark.parametrize("begun", [False, True])
def test_reported_engine_loss_is_retried_within_limits(begun: bool) -> None:
    world = RecordedEffects()
    dispatcher = Dispatcher("gw", world)
    dispatcher.on_status(status(instance("i"), instance("j")), 0)
    made = ticket("r", now=0)
    dispatcher.on_request(made, 2, 0)
    made.is_committed, made.is_admitted = begun, True
    dispatcher.on_engine_lost(made, EngineFailed("it ended"), 1)
    if not begun:
        assert world.sent == [("r", "i"), ("r", "j")]
        made.is_admitted = True
        dispatcher.on_engine_lost(made, EngineFailed("it ended"), 10)
        assert len(world.sent) == MAX_ENGINE_DEATHS
    assert world.failed["r"].message.startswith("it ended")
    assert dispatcher.count_in_flight("m") == 0
