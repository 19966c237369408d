"""The response writer and an engine that stops in the middle of its HTTP response."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable

import pytest
from starlette.types import Message

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from services.gateway.http.error_formats import OPENAI
from services.gateway.http.responses.buffered import BufferedCompletion, BufferedSink, PassthroughOnly
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.http.responses.response_writer import ResponseWriter
from services.gateway.requests import response_reader
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.passthrough import PassthroughResponse
from services.gateway.settings import GatewaySettings
from shared.contracts.inference import (
    ChoiceDelta,
    InferChunk,
    InferData,
    InferEnd,
    InferFailed,
    InferResponse,
    InferStarted,
    TokenLogprob,
)
from shared.errors import EngineFailed, ThawError
from tests.support.fake_engine import card_of
from tests.unit.gateway.recorded_effects import RecordedEffects, instance, status, ticket

EVENTS = "text/event-stream"
COMMENT_S = 0.01
EVENT = b'data: {"text":"a"}\n\n'
MAX_TAKES = 1_000
"""Far more than a response needs here."""


class Streamed(RecordedEffects):
    """A streamed request on one of two instances, and its writer."""

    def __init__(self, sink: EventStream | BufferedSink | None = None) -> None:
        super().__init__()
        self.dispatcher = Dispatcher("gw", self)
        self.dispatcher.on_status(status(instance("i", "alpha"), instance("j", "alpha")), time.monotonic())
        self.ticket = ticket("r", "alpha", time.monotonic())
        sink = sink or PassthroughOnly()
        self.request = ActiveRequest(self.ticket, card_of("alpha"), EngineRequest("other", b"{}"), sink, self.dispatcher, 1 << 20)
        settings = GatewaySettings(waking_comment_after=COMMENT_S, waking_comment_interval=COMMENT_S, keep_alive_interval=COMMENT_S)
        self.writer = ResponseWriter(self.request, sink, settings, self._describe_wait, OPENAI, accepts_events=True)
        self.on_comment: Callable[[], None] = lambda: None
        self.written = bytearray()
        self.is_complete = False
        self.changed = asyncio.Condition()
        self.dispatcher.on_request(self.ticket, 1, time.monotonic())

    def send(self, ticket: Ticket, route: Route) -> None:
        super().send(ticket, route)
        self.request.begin_attempt(route, time.monotonic())

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        super().fail(ticket, error)
        self.request.completion.fail(error)

    def hear(self, *messages: InferResponse | InferData | InferEnd | InferFailed | InferStarted | InferChunk) -> None:
        for message in messages:
            numbered = message.model_copy(update={"seq": self.request.attempt.next_seq})
            self.request.on_message(numbered.model_dump_json().encode())

    def _describe_wait(self, request: ActiveRequest) -> str:
        self.on_comment()
        return "waiting"

    async def write(self) -> None:
        await self.writer.write({"type": "http"}, asyncio.Event().wait, self._send)  # type: ignore[arg-type] # no message arrives

    async def _send(self, message: Message) -> None:
        async with self.changed:
            self.written += message.get("body", b"")
            self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            self.changed.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(holds)


def data(content: bytes) -> InferData:
    return InferData(seq=0, data=base64.b64encode(content).decode())


@pytest.fixture
def bounded_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a writer that polls for output without letting the event loop run."""
    takes, take = 0, PassthroughResponse.take

    def counted(self: PassthroughResponse) -> bytes:
        nonlocal takes
        takes += 1
        assert takes <= MAX_TAKES, "the writer polls"
        return take(self)

    monkeypatch.setattr(PassthroughResponse, "take", counted)


@pytest.mark.usefixtures("bounded_takes")
async def test_a_comment_waits_while_an_engine_pauses_in_the_middle_of_an_event() -> None:
    streamed = Streamed()
    writing = asyncio.create_task(streamed.write())
    streamed.hear(InferResponse(status=200, content_type=EVENTS), data(EVENT + EVENT[:8]))
    await streamed.until(lambda: len(streamed.written) > len(EVENT))
    await asyncio.wait({writing}, timeout=5 * COMMENT_S)  # a comment is due
    assert not writing.done() or writing.result() is None
    streamed.hear(data(EVENT[8:]), InferEnd(seq=0))
    await writing
    assert streamed.written.startswith(EVENT * 2)
    assert streamed.is_complete


@pytest.mark.parametrize(
    "head",
    [
        InferResponse(status=503, content_type="application/json"),
        InferResponse(status=200, content_type="application/json"),
        InferResponse(status=400, content_type="text/plain"),
    ],
    ids=["error", "json", "text"],
)
async def test_an_announced_stream_has_an_error_if_the_next_engine_sends_no_events(head: InferResponse) -> None:
    streamed = Streamed()
    writing = asyncio.create_task(streamed.write())
    streamed.hear(InferResponse(status=200, content_type=EVENTS))
    await streamed.until(lambda: b": waiting" in streamed.written)
    streamed.hear(InferFailed(seq=0, error=EngineFailed("it ended").body(), engine_lost=True))
    assert len(streamed.sent) == 2
    streamed.hear(head, data(b'{"message":"no"}'), InferEnd(seq=0))
    await writing
    assert b'data: {"error":{' in streamed.written
    assert streamed.is_complete


async def test_an_announced_stream_has_an_error_if_the_next_engine_fails() -> None:
    streamed = Streamed()
    writing = asyncio.create_task(streamed.write())
    streamed.hear(InferResponse(status=200, content_type=EVENTS))
    await streamed.until(lambda: b": waiting" in streamed.written)
    streamed.hear(InferFailed(seq=0, error=EngineFailed("it ended").body(), engine_lost=True))
    streamed.hear(InferResponse(status=200, content_type="application/json"), InferFailed(seq=0, error=EngineFailed("no").body()))
    await writing
    assert b'data: {"error":{' in streamed.written
    assert streamed.is_complete


async def test_a_response_that_is_no_event_stream_has_no_comment() -> None:
    streamed, loop = Streamed(), asyncio.get_running_loop()

    def respond() -> None:
        """Begin between the comment and the writer's next step, and end after that step."""
        streamed.on_comment = lambda: None
        loop.call_soon(streamed.hear, InferResponse(status=200, content_type="audio/mpeg"))
        loop.call_later(COMMENT_S, streamed.hear, data(b"sound"), InferEnd(seq=0))

    streamed.on_comment = respond
    await streamed.write()
    assert streamed.written == b"sound"
    assert streamed.is_complete


async def test_a_whole_response_has_no_comment_before_it() -> None:
    streamed, loop, body = Streamed(), asyncio.get_running_loop(), b'{"error":{"message":"no"}}'

    def respond() -> None:
        """Begin between the comment and the writer's next step, and end after that step."""
        streamed.on_comment = lambda: None
        loop.call_soon(streamed.hear, InferResponse(status=400, content_type="application/json"))
        loop.call_later(COMMENT_S, streamed.hear, data(body), InferEnd(seq=0))

    streamed.on_comment = respond
    await streamed.write()
    assert streamed.written == body


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_response_that_is_collected_whole_is_bounded_in_bytes(is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_reader, "_MAX_BUFFERED_BYTES", 10_000)
    stream = EventStream(Head("id", "chat.completion.chunk", 1, "m"), include_usage=False, token_ids=False, logprobs=True)
    streamed = Streamed(stream if is_streamed else BufferedCompletion(Head("id", "chat.completion", 1, "m"), 1, False))
    token = TokenLogprob(token_id=1, token="a", logprob=-1.0)
    streamed.hear(InferStarted(prompt_tokens=1))
    for _ in range(100):
        streamed.hear(InferChunk(seq=0, choices=(ChoiceDelta(text="a", token_ids=(1,), logprobs=(token,)),)))
        stream.take()
    error = streamed.request.completion.error
    assert (error is None) is is_streamed
    assert is_streamed or (error is not None and "10000 bytes. Request it as a stream" in error.message)
