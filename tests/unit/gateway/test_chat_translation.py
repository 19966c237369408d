"""A chat completion passes through `TranslatedSend` as another API's stream or body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Message

from services.gateway.http.responses.translated_send import TranslatedSend
from services.gateway.http.translation.chat_translation import ChatTranslation
from services.gateway.http.translation.chat_translator import Event
from shared.errors import EngineFailed

STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
BODY = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
CHUNK = b'data: {"n": 1}\n\n'
DONE = b"data: [DONE]\n\n"


class Numbers:
    """Translates each chunk to its number."""

    def __init__(self) -> None:
        self.sum = 0

    def add(self, chunk: dict[str, Any]) -> list[Event]:
        self.sum += chunk["n"]
        return [{"type": "number", "n": chunk["n"]}]

    def finish(self) -> list[Event]:
        return [{"type": "sum", "n": self.sum}]

    def fail(self, code: str | None, message: str) -> list[Event]:
        return [{"type": "failed", "message": message}]

    def body(self) -> dict[str, Any]:
        return {"sum": self.sum}


class Client:
    """Sends a chat completion through the translation, and keeps what arrives."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.stored = 0
        self._send = TranslatedSend(self._keep, ChatTranslation(Numbers(), lambda status, data: {"status": status}, self._store))

    async def _keep(self, message: Message) -> None:
        self.sent.append(message)

    async def _store(self) -> None:
        self.stored += 1

    async def receive(self, start: Message, *bodies: bytes) -> None:
        await self._send(dict(start))
        for i, body in enumerate(bodies, 1):
            await self._send({"type": "http.response.body", "body": body, "more_body": i < len(bodies)})

    def kinds(self) -> list[str]:
        text = b"".join(m["body"] for m in self.sent[1:]).decode()
        return [line.removeprefix("event: ") for line in text.splitlines() if line.startswith(("event: ", ":"))]


async def test_stream_is_translated_and_stored_before_its_last_event() -> None:
    client = Client()
    await client.receive(STREAM, CHUNK[:5], CHUNK[5:] + b": waking\n\n", CHUNK + DONE, b"")
    assert client.kinds() == ["number", ": waking", "number", "sum"]
    assert client.sent[0] == STREAM
    assert client.stored == 1
    assert [m["more_body"] for m in client.sent[1:]][-1] is False


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (b'data: {"error": {"message": "gone"}}\n\n', "gone"),
        (b"data: {}\n\n", "The engine sent a malformed chat completion"),
        (b"", "The engine ended the response early"),
    ],
    ids=["error", "malformed", "cut"],
)
async def test_stream_ends_once_at_what_goes_wrong(rest: bytes, message: str) -> None:
    client = Client()
    more = (CHUNK, DONE) if rest else ()
    await client.receive(STREAM, CHUNK, rest, *more)
    assert client.kinds() == ["number", "failed"]
    assert message.encode() in client.sent[-1]["body"]
    assert client.sent[-1]["more_body"] is False
    assert client.stored == 0


async def test_body_is_translated_once_it_is_complete() -> None:
    client = Client()
    await client.receive(BODY, b'{"n"', b": 2}")
    assert json.loads(client.sent[1]["body"]) == {"sum": 2}
    assert dict(client.sent[0]["headers"])[b"content-length"] == b"9"
    assert client.stored == 1


async def test_error_is_converted_and_nothing_is_stored() -> None:
    client = Client()
    await client.receive(BODY | {"status": 429}, b'{"error": {}}')
    assert (client.sent[0]["status"], json.loads(client.sent[1]["body"])) == (429, {"status": 429})
    assert client.stored == 0


async def test_malformed_body_is_a_failure_of_the_engine() -> None:
    with pytest.raises(EngineFailed, match="malformed chat completion"):
        await Client().receive(BODY, b"[1]")
