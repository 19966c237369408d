"""How an exchange is written to its client: whole, or as a stream; and how its leaving is noticed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope, Send

from services.gateway.exchange import Exchange
from services.gateway.http.collect import Whole
from services.gateway.http.errors import error_object, json_response
from services.gateway.http.sse import EventStream, comment, event
from services.gateway.recording import server_timing
from services.gateway.settings import GatewaySettings

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The last keeps nginx from holding events back."""
REPLAYED = "idempotent-replayed"
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")


@asynccontextmanager
async def watched(exchange: Exchange, receive: Receive) -> AsyncIterator[None]:
    """Have the exchange end as soon as the client is gone."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await exchange.client_left()

    task = asyncio.create_task(watch(), name="client")
    try:
        yield
    finally:
        task.cancel()


def ignored_names(exchange: Exchange) -> str:
    """The names are the client's own: whatever would not be one word of a header is not let into one."""
    return ", ".join(_UNSAFE.sub("?", name)[:64] for name in exchange.ignored[:32])


def extra_headers(exchange: Exchange) -> dict[str, str]:
    headers = {REPLAYED: "true"} if exchange.replayed else {}
    if exchange.ignored:
        headers["x-thaw-ignored"] = ignored_names(exchange)
    if timing := server_timing(exchange):
        headers["server-timing"] = timing
    return headers


async def answer_whole(exchange: Exchange, sink: Whole, scope: Scope, receive: Receive, send: Send) -> None:
    async with watched(exchange, receive):
        while not exchange.ended:
            await exchange.changed()
    if exchange.gone:
        return
    if exchange.error is not None:
        await exchange.settled()
        raise exchange.error
    await json_response(sink.answer(), headers=extra_headers(exchange))(scope, receive, send)


class StreamedAnswer:
    """Headers go out with the first token, so that whatever fails before it has its own status; or, if that takes long, with the first
    comment, after which failures are events."""

    def __init__(
        self, exchange: Exchange, stream: EventStream, settings: GatewaySettings, progress: Callable[[Exchange], str]
    ) -> None:
        self._exchange = exchange
        self._stream = stream
        self._settings = settings
        self._progress = progress
        self._headers_sent = False
        self._timing_late = False
        self._wrote_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._settings.waking_comment_after, self._on_timer)
        try:
            async with watched(self._exchange, receive):
                await self._write(send)
        finally:
            self._timer.cancel()

    async def _write(self, send: Send) -> None:
        exchange, stream = self._exchange, self._stream
        while True:
            if exchange.gone:
                return
            ended = exchange.ended
            if ended and exchange.error is not None:
                await exchange.settled()
                if not self._headers_sent:
                    raise exchange.error
                stream.put(event(error_object(exchange.error)))
            if stream.pending:
                await self._headers(send)
                await send({"type": "http.response.body", "body": stream.take(), "more_body": not ended})
                self._wrote_at = self._loop.time()
            if ended:
                return
            if not stream.pending and not exchange.ended:
                await exchange.changed()

    async def _headers(self, send: Send) -> None:
        if self._headers_sent:
            return
        self._headers_sent = True
        self._timing_late = self._exchange.first_at is None
        headers = [(k.encode(), v.encode()) for k, v in extra_headers(self._exchange).items()] if not self._timing_late else []
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM + headers})

    def _late(self) -> bytes:
        """What headers would have said, had they not gone out before it was known."""
        ignored = comment(f"x-thaw-ignored {ignored_names(self._exchange)}") if self._exchange.ignored else b""
        return ignored + comment(f"timing {server_timing(self._exchange)}")

    def _on_timer(self) -> None:
        """Say something where nothing has been said for long."""
        exchange = self._exchange
        if exchange.ended:
            return
        if exchange.first_at is None:
            self._stream.put(comment(self._progress(exchange)))
            self._stream.before_done = self._late
            exchange.wake()
            again = self._settings.waking_comment_interval
        else:
            again = self._settings.keep_alive_interval
            if self._loop.time() - self._wrote_at >= again:
                self._stream.put(comment("keep-alive"))
                exchange.wake()
        self._timer = self._loop.call_later(again, self._on_timer)
