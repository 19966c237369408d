"""The event stream of a chat completion is decoded however it is cut."""

from __future__ import annotations

import pytest

from services.gateway.http.translation.chat_stream import ChatStreamDecoder, Comment, Done, StreamError

STREAM = ': waking\n\ndata: {"a":"né"}\n\n: timing\ndata: {"b":\ndata: 1}\n\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_events_are_decoded_however_they_are_cut(size: int, ending: bytes) -> None:
    decoder, data = ChatStreamDecoder(), STREAM.replace(b"\n", ending)
    found = [d for at in range(0, len(data), size) for d in decoder.feed(data[at : at + size])]
    assert found[:3] == [Comment(b": waking\n\n"), {"a": "né"}, {"b": 1}]
    assert isinstance(found[3], Done)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'data: {"error":{"message":"m","code":"c"}}\n\n', StreamError("c", "m")),
        (b'event: error\ndata: {"type":"error","code":"c","message":"m"}\n\n', StreamError("c", "m")),
        (b'data: {"error":{"message":"m","code":500}}\n\n', StreamError(None, "m")),
        (b'data: {"error":"m"}\n\n', StreamError(None, "m")),
    ],
)
def test_error_of_each_form_is_decoded(event: bytes, error: StreamError) -> None:
    assert list(ChatStreamDecoder().feed(event)) == [error]


def test_malformed_event_is_refused() -> None:
    with pytest.raises(ValueError, match="object"):
        list(ChatStreamDecoder().feed(b"data: [1]\n\n"))
