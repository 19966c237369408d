"""Usage that a host reads from forwarded responses."""

from __future__ import annotations

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from services.enginehost.server.usage_meter import UsageMeter, usage_of

EVENTS = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in ("a", "ü", 'usage: "x"')]
LAST = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}


def stream(*events: object, end: str = "\n\n") -> bytes:
    return "".join(f"data: {json.dumps(e, ensure_ascii=False)}{end}" for e in events).encode() + f"data: [DONE]{end}".encode()


def fed(meter: UsageMeter, data: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(cuts), len(data)]
    return b"".join(meter.feed(data[a:b]) for a, b in itertools.pairwise(edges)) + meter.finish()


@given(st.lists(st.integers(0, 300), max_size=8), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_hidden_usage_is_removed_from_any_split_of_the_stream(cuts: list[int], end: str) -> None:
    data = stream(*EVENTS, LAST, end=end)
    meter = UsageMeter("text/event-stream; charset=utf-8", hide_usage=True)
    assert fed(meter, data, [min(c, len(data)) for c in cuts]) == stream(*EVENTS, end=end)
    assert (meter.usage.prompt_tokens, meter.usage.completion_tokens, meter.usage.cached_tokens) == (7, 3, 2)


@given(st.lists(st.integers(0, 300), max_size=8))
def test_requested_usage_is_forwarded_unchanged(cuts: list[int]) -> None:
    data = stream(*EVENTS, LAST)
    meter = UsageMeter("text/event-stream", hide_usage=False)
    assert fed(meter, data, [min(c, len(data)) for c in cuts]) == data
    assert meter.usage.completion_tokens == 3


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=5), st.booleans())
def test_all_bytes_are_forwarded(data: bytes, cuts: list[int], hide: bool) -> None:
    for kind in ("text/event-stream", "application/json", "audio/wav"):
        assert fed(UsageMeter(kind, hide_usage=hide), data, [min(c, len(data)) for c in cuts]) == data


def test_large_event_is_forwarded_before_it_is_complete() -> None:
    meter = UsageMeter("text/event-stream", hide_usage=True)
    assert meter.feed(b"data: {" + b"x" * (1 << 20)).startswith(b"data: {")


def test_usage_by_the_names_of_other_apis() -> None:
    found = usage_of({"usage": {"input_tokens": 5, "output_tokens": 6}})
    assert found is not None
    assert (found.prompt_tokens, found.completion_tokens) == (5, 6)
    assert usage_of({"usage": None}) is None
    assert usage_of([1]) is None


def test_usage_is_read_from_a_json_response() -> None:
    meter = UsageMeter("application/json", hide_usage=False)
    body = json.dumps({"usage": LAST["usage"]}).encode()
    assert fed(meter, body, [3]) == body
    assert meter.usage.prompt_tokens == 7


def named_events(*events: dict[str, object]) -> bytes:
    """Return a stream of the Messages or Responses API, as vLLM writes it."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()


@given(st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_usage_of_messages_is_read_from_the_events(cuts: list[int], is_long: bool) -> None:
    delta: dict[str, object] = {"type": "content_block_delta", "delta": {"text": "x" * 1000}}
    data = named_events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0, "cache_read_input_tokens": 2}}},
        *([delta] * (200 if is_long else 1)),
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 6}},
        {"type": "message_stop"},
    )
    meter = UsageMeter("text/event-stream", hide_usage=False)
    assert fed(meter, data, cuts) == data
    assert (meter.usage.prompt_tokens, meter.usage.completion_tokens, meter.usage.cached_tokens) == (7, 6, 2)


@given(st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_usage_of_responses_is_read_from_the_last_event(cuts: list[int], is_long: bool) -> None:
    usage = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 6, "total_tokens": 13}
    output = '"usage": {"input_tokens": 1}' * (5000 if is_long else 1)
    data = named_events(
        {"type": "response.created", "response": {"id": "r", "usage": None}},
        {"type": "response.completed", "response": {"id": "r", "output": output, "usage": usage, "user": None}},
    )
    meter = UsageMeter("text/event-stream", hide_usage=False)
    assert fed(meter, data, cuts) == data
    assert (meter.usage.prompt_tokens, meter.usage.completion_tokens, meter.usage.cached_tokens) == (7, 6, 2)
