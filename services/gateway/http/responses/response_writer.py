"""How an exchange is written to its client, in whatever form it is answered; and how the client's leaving is noticed.

Tokens, whole       one JSON body when the last has come.
Tokens, streamed    events. Headers go out with the first, so that whatever fails before it has its own status; or, if that takes long,
                    with a comment, after which failures are events.
HTTP's form         status, content type and bytes as the engine gave them: JSON and errors when they are whole, all else as it comes.
                    An error that clients of the API could not read is put into the API's form.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.domain.ticket import Stage
from services.gateway.http.error_formats import Dialect
from services.gateway.http.errors import json_response
from services.gateway.http.responses.buffered import Whole
from services.gateway.http.responses.engine_errors import relayed_error
from services.gateway.http.responses.event_stream import DONE, EventStream, comment
from services.gateway.requests.active_request import Exchange
from services.gateway.requests.passthrough import Relay
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.request_log import server_timing
from shared.errors import EngineFailed, InvalidRequest, ThawError

log = logging.getLogger(__name__)
EVENT_STREAM = "text/event-stream; charset=utf-8"
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The last keeps nginx from holding events back."""
REPLAYED = "idempotent-replayed"
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_OURS = frozenset(
    {"content-length", "transfer-encoding", "connection", "keep-alive", "date", "server", "x-request-id", "set-cookie"}
)


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


def relayed_headers(relay: Relay) -> dict[str, str]:
    """The engine's headers as far as they are fit to be passed on."""
    kind = relay.head.content_type if _PRINTABLE.fullmatch(relay.head.content_type) else "application/octet-stream"
    given = {k.lower(): v for k, v in relay.head.headers.items() if not _UNSAFE.search(k) and _PRINTABLE.fullmatch(v)}
    return {k: v for k, v in given.items() if k not in _OURS} | {"content-type": kind}


class Answer:
    """Writes one exchange. `events`: the client asked for a stream of them, so comments may be sent while it waits. Headers that went out
    with one (`_early`) announce events, and know no timing: that is said at the end (`_timing_late`)."""

    def __init__(
        self,
        exchange: Exchange,
        sink: EventStream | Whole,
        settings: GatewaySettings,
        progress: Callable[[Exchange], str],
        dialect: Dialect,
        events: bool,
    ) -> None:
        self._exchange = exchange
        self._sink = sink
        self._settings = settings
        self._progress = progress
        self._dialect = dialect
        self._events = events
        self._comments = bytearray()
        self._begun = False
        self._early = False
        self._timing_late = False
        self._wrote_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what the exchange failed with, if nothing has been sent by then."""
        self._loop = asyncio.get_running_loop()
        if self._events:
            self._exchange.on_waiting = self._wait_again
            self._timer = self._loop.call_later(self._settings.waking_comment_after, self._on_timer)
        try:
            async with watched(self._exchange, receive):
                await self._write(scope, receive, send)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        while not exchange.gone:
            if self._begun and exchange.relay is None and isinstance(self._sink, EventStream):
                await self._pass_on(self._sink, send)
            ended = exchange.ended
            if ended and exchange.error is not None:
                await exchange.settled()
                if not self._begun and not (exchange.replayed and self._pending):
                    raise exchange.error
                if not self._takes_events:
                    log.warning("an answer that is no stream of events broke off", extra={"error": exchange.error.message})
                    return
                data = self._failure(exchange.error)
            elif ended and not self._begun and not self._streams:
                await self._whole()(scope, receive, send)
                return
            else:
                data = self._take()
                data += self._ending() if ended else b""
            if data or ended:
                await self._send(data, send, more=not ended)
            if ended:
                return
            if not self._pending and not exchange.ended:
                await exchange.changed()

    async def _pass_on(self, stream: EventStream, send: Send) -> None:
        """Write tokens as they come, until something else is to be written or told: the way of nearly all of them."""
        exchange = self._exchange
        while not (exchange.ended or exchange.gone or self._comments or exchange.relay is not None):
            if stream.pending:
                exchange.told = True
                await send({"type": "http.response.body", "body": stream.take(), "more_body": True})
                self._wrote_at = self._loop.time()
            else:
                await exchange.changed()

    # What there is to be written.

    @property
    def _streams(self) -> bool:
        """Whether what comes of the answer is written as it comes."""
        relay = self._exchange.relay
        if relay is None:
            return isinstance(self._sink, EventStream)
        return relay.streams and (relay.is_events or not self._early)

    @property
    def _takes_events(self) -> bool:
        relay = self._exchange.relay
        return self._early or relay is None or relay.is_events

    @property
    def _pending(self) -> bool:
        relay = self._exchange.relay
        held = relay.size if relay is not None else self._sink.pending
        return bool(self._comments or (held and self._streams))

    def _take(self) -> bytes:
        relay, comments = self._exchange.relay, bytes(self._comments)
        if relay is None:
            self._comments.clear()
            return (self._sink.take() if isinstance(self._sink, EventStream) else b"") + comments
        if not self._streams:
            self._comments.clear()
            return comments
        data = self._with_timing(relay.take())
        if not relay.between_events:
            return data
        self._comments.clear()
        return data + comments

    def _failure(self, error: ThawError) -> bytes:
        """The last event of a stream that broke off. A repetition gets what the first client got before it."""
        relay = self._exchange.relay
        data = self._take() if self._exchange.told or self._exchange.replayed else b""
        apart = b"" if relay is None or relay.between_events else b"\n\n"
        return data + apart + self._dialect.event(error, relay.events if relay is not None else 0)

    def _ending(self) -> bytes:
        """What an answer in HTTP's form still needs where comments went out before it."""
        relay = self._exchange.relay
        if relay is None or not self._early:
            return b""
        if not self._streams:
            return self._dialect.event(_misfit(relay), 0)
        return self._late() if self._timing_late else b""

    def _with_timing(self, data: bytes) -> bytes:
        """Say what the headers could not before the end that OpenAI's clients stop at."""
        end = data.rfind(DONE) if self._timing_late else -1
        if end < 0 or data[max(0, end - 1) : end] not in (b"", b"\n"):
            return data
        self._timing_late = False
        return data[:end] + self._late() + data[end:]

    def _whole(self) -> Response:
        exchange, relay = self._exchange, self._exchange.relay
        if relay is not None:
            body, headers = relay.take(), relayed_headers(relay) | extra_headers(exchange)
            if (error := relayed_error(relay, body, self._dialect)) is not None:
                return json_response(error, relay.head.status, headers | {"content-type": "application/json"})
            return Response(body, relay.head.status, headers)
        assert not isinstance(self._sink, EventStream)
        return json_response(self._sink.answer(), headers=extra_headers(exchange))

    async def _send(self, data: bytes, send: Send, more: bool) -> None:
        await self._headers(send)
        self._exchange.told = self._exchange.told or self._exchange.first_at is not None
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._wrote_at = self._loop.time()

    async def _headers(self, send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        exchange, relay = self._exchange, self._exchange.relay
        self._early = self._timing_late = exchange.first_at is None and relay is None
        status, headers = 200, {"content-type": EVENT_STREAM}
        if relay is not None:
            status, headers = relay.head.status, relayed_headers(relay)
        if relay is None or relay.is_events:
            headers |= _UNBUFFERED
        if not self._timing_late:
            headers |= extra_headers(exchange)
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    # What is said while nothing comes.

    def _late(self) -> bytes:
        """What headers would have said, had they not gone out before it was known."""
        ignored = comment(f"x-thaw-ignored {ignored_names(self._exchange)}") if self._exchange.ignored else b""
        return ignored + comment(f"timing {server_timing(self._exchange)}")

    def _wait_again(self) -> None:
        """The engine is gone, and another one not there yet: say so in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._settings.waking_comment_after, self._on_timer)

    def _on_timer(self) -> None:
        exchange = self._exchange
        if exchange.ended or not self._takes_events:
            return
        if exchange.first_at is None or exchange.ticket.stage is Stage.QUEUED:
            self._comments += comment(self._progress(exchange))
            if exchange.first_at is None and isinstance(self._sink, EventStream):
                self._sink.before_done = self._late
            exchange.wake()
            again = self._settings.waking_comment_interval
        else:
            again = self._settings.keep_alive_interval
            if self._loop.time() - self._wrote_at >= again:
                self._comments += comment("keep-alive")
                exchange.wake()
        self._timer = self._loop.call_later(again, self._on_timer)


def _misfit(relay: Relay) -> ThawError:
    """An answer that is no stream, where one has been begun."""
    words = relay.take()[:2000].decode(errors="replace")
    kind = InvalidRequest if relay.head.status in range(400, 500) else EngineFailed
    return kind(f"the engine answered with status {relay.head.status}: {words}")
