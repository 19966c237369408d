"""The client of the warm path's benchmark: its counts."""

from __future__ import annotations

import pytest

from bench.load_client import Events, Tally, parse, request_of
from bench.prepared_engine import FREE, WORDS, HttpDoor

STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b": waking\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":" the"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content": "\\"content\\":\\"x\\""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 7, 100, len(STREAM)])
def test_texts_are_counted_however_the_stream_is_cut(size: int) -> None:
    events = Events()
    texts = sum(events.feed(STREAM[i : i + size]) for i in range(0, len(STREAM), size))
    assert texts == 2
    assert events.done


def test_stream_is_not_done_before_its_last_event() -> None:
    events = Events()
    assert events.feed(STREAM.removesuffix(b"data: [DONE]\n\n")) == 2
    assert not events.done


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(RuntimeError, match="out of order"):
        Events().feed(b'data: {"error":{"message":"out of order"}}\n\n')


def test_summary_has_medians_and_the_token_rate() -> None:
    summary = Tally(ttft_ms=[1.0, 9.0, 2.0], gaps_ms=[0.0, 4.0], tokens=30, elapsed_s=2.0).summary()
    assert summary["ttft_p50_ms"] == 2.0
    assert summary["gap_mean_ms"] == 2.0
    assert summary["tokens_per_s"] == 15.0


def test_request_has_its_content_length() -> None:
    head, _, body = request_of("free", 7).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b'"max_tokens": 7' in body


def test_command_line_is_parsed() -> None:
    options = parse(["--port=1", "--model=free", "--streams=4", "--seconds=0.5"])
    assert (options.port, options.streams, options.seconds, options.requests) == (1, 4, 0.5, 1)


async def test_engine_sends_one_token_per_event() -> None:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": request_of(FREE, len(WORDS) + 1).partition(b"\r\n\r\n")[2], "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    await HttpDoor({FREE: 0.0})({"type": "http"}, receive, send)  # type: ignore[arg-type]  # ASGI's mappings are mutable
    events = Events()
    texts = [events.feed(body) for m in sent if isinstance(body := m.get("body"), bytes)]
    assert max(texts) == 1
    assert sum(texts) == len(WORDS) + 1
    assert events.done
