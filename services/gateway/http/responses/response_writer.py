"""Writing of a response to its client, and detection of a disconnect.

Tokens, whole: one JSON body once the last token has arrived.

Tokens, streamed: server-sent events. The headers are sent with the first event, so that a failure
before it has its own HTTP status. If the first event takes long, the headers are sent with a
comment, and later failures become events.

HTTP (pass-through): status, content type and bytes of the engine; JSON and errors once they are
complete, everything else as it arrives. An error that clients of the API cannot parse is converted
to the API's form.
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
from services.gateway.http.error_formats import ErrorFormat
from services.gateway.http.errors import json_response
from services.gateway.http.responses.buffered import BufferedSink
from services.gateway.http.responses.engine_errors import convert_error
from services.gateway.http.responses.event_stream import DONE, EventStream, comment
from services.gateway.http.responses.usage_header import USAGE_HEADER, format_usage
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.passthrough import PassthroughResponse
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.request_log import server_timing
from shared.errors import EngineFailed, InvalidRequest, ThawError

log = logging.getLogger(__name__)
EVENT_STREAM = "text/event-stream; charset=utf-8"
_UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""The last keeps nginx from buffering events."""
REPLAYED = "idempotent-replayed"
_UNSAFE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")
_GATEWAY_HEADERS = frozenset(
    {"content-length", "transfer-encoding", "connection", "keep-alive", "date", "server", "x-request-id", "set-cookie"}
)
"""Headers that an engine may not set."""


@asynccontextmanager
async def cancel_on_disconnect(request: ActiveRequest, receive: Receive) -> AsyncIterator[None]:
    """End the request as soon as its client disconnects, inside the block."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await request.client_left()

    task = asyncio.create_task(watch(), name="client")
    try:
        yield
    finally:
        task.cancel()


def ignored_names(request: ActiveRequest) -> str:
    """List the ignored parameters; unsafe characters are replaced."""
    return ", ".join(_UNSAFE.sub("?", name)[:64] for name in request.stats.ignored_parameters[:32])


def extra_headers(request: ActiveRequest) -> dict[str, str]:
    """Build the gateway's own headers: replay, ignored parameters, timing."""
    headers = dict(request.headers)
    if request.response.is_replay:
        headers[REPLAYED] = "true"
    if request.stats.ignored_parameters:
        headers["x-thaw-ignored"] = ignored_names(request)
    if timing := server_timing(request):
        headers["server-timing"] = timing
    return headers


def passthrough_headers(passthrough: PassthroughResponse) -> dict[str, str]:
    """Return the engine's headers that may be passed on."""
    head = passthrough.head
    content_type = head.content_type if _PRINTABLE.fullmatch(head.content_type) else "application/octet-stream"
    safe = {k.lower(): v for k, v in head.headers.items() if not _UNSAFE.search(k) and _PRINTABLE.fullmatch(v)}
    return {k: v for k, v in safe.items() if k not in _GATEWAY_HEADERS} | {"content-type": content_type}


class ResponseWriter:
    """Write the response of one request."""

    def __init__(
        self,
        request: ActiveRequest,
        sink: EventStream | BufferedSink,
        settings: GatewaySettings,
        progress: Callable[[ActiveRequest], str],
        error_format: ErrorFormat,
        *,
        accepts_events: bool,
    ) -> None:
        """Prepare to write what `sink` collects.

        Args:
            progress: Describes what the request waits for.
            accepts_events: The client asked for a stream, so that it may receive comments.
        """
        self._request = request
        self._sink = sink
        self._settings = settings
        self._progress = progress
        self._error_format = error_format
        self._accepts_events = accepts_events
        if settings.usage_headers and isinstance(sink, EventStream):
            sink.before_done = self._late_comments
        self._comments = bytearray()
        self._headers_sent = False
        self._announces_events = False
        """The headers that were sent announce events, whatever another engine responds later."""
        self._owes_timing = False
        """The timing, which headers sent with a comment lack, has not been sent yet."""
        self._written_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response; raise the request's error if nothing was sent before it."""
        self._loop = asyncio.get_running_loop()
        if self._accepts_events:
            self._request.on_requeued = self._restart_timer
            self._timer = self._loop.call_later(self._settings.waking_comment_after, self._on_timer)
        try:
            async with cancel_on_disconnect(self._request, receive):
                await self._write(scope, receive, send)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, completion, response = self._request, self._request.completion, self._request.response
        while not completion.has_client_left:
            if self._headers_sent and response.passthrough is None and isinstance(self._sink, EventStream):
                await self._forward_tokens(self._sink, send)
            is_done = completion.is_done
            if is_done and completion.error is not None:
                await request.wait_until_settled()
                if not self._headers_sent and not (response.is_replay and self._has_pending):
                    raise completion.error
                response.has_late_error = True
                if not self._can_send_events:
                    log.warning("a response that is not an event stream broke off", extra={"error": completion.error.message})
                    return
                data = self._failure(completion.error)
            elif is_done and not self._headers_sent and not self._streams:
                await (await self._whole_response())(scope, receive, send)
                return
            else:
                data = self._take()
                data += self._ending() if is_done else b""
            if data or is_done:
                await self._send(data, send, more=not is_done)
            if is_done:
                return
            if not self._has_pending and not completion.is_done:
                await completion.wait_for_wake()

    async def _forward_tokens(self, stream: EventStream, send: Send) -> None:
        """Write tokens as they arrive, until there is something else to write."""
        completion, response = self._request.completion, self._request.response
        while not (completion.is_done or completion.has_client_left or self._comments or response.passthrough is not None):
            if stream.pending:
                response.has_started = True
                await send({"type": "http.response.body", "body": stream.take(), "more_body": True})
                self._written_at = self._loop.time()
            else:
                await completion.wait_for_wake()

    # Pending output.

    @property
    def _streams(self) -> bool:
        """True if output is written as it arrives."""
        passthrough = self._request.response.passthrough
        if passthrough is None:
            return isinstance(self._sink, EventStream)
        return passthrough.streams and (passthrough.is_event_stream or not self._announces_events)

    @property
    def _can_send_events(self) -> bool:
        passthrough = self._request.response.passthrough
        return self._announces_events if self._headers_sent else passthrough is None or passthrough.is_event_stream

    @property
    def _has_pending(self) -> bool:
        """True if `_take` returns something: comments wait for the end of an engine's event."""
        passthrough, streams = self._request.response.passthrough, self._streams
        pending = passthrough.size if passthrough is not None else self._sink.pending
        can_comment = passthrough is None or not passthrough.is_event_stream or passthrough.is_between_events
        return bool((self._comments and can_comment) or (pending and streams))

    def _take(self) -> bytes:
        passthrough, comments = self._request.response.passthrough, bytes(self._comments)
        if passthrough is None:
            self._comments.clear()
            return (self._sink.take() if isinstance(self._sink, EventStream) else b"") + comments
        if not self._streams:
            self._comments.clear()
            return comments if self._headers_sent else b""  # the headers will announce no events
        data = self._insert_timing(passthrough.take())
        if passthrough.is_event_stream and not passthrough.is_between_events:
            return data
        self._comments.clear()
        return data + comments if passthrough.is_event_stream else data

    def _failure(self, error: ThawError) -> bytes:
        """Format the end of a stream that broke off: pending output, then the error."""
        response = self._request.response
        passthrough = response.passthrough
        data = self._take() if response.has_started or response.is_replay else b""
        separator = b"" if passthrough is None or passthrough.is_between_events else b"\n\n"
        events = passthrough.events if passthrough is not None else 0
        return data + separator + self._error_format.event(error, events)

    def _ending(self) -> bytes:
        """Format what an HTTP response of an engine still needs at its end."""
        passthrough = self._request.response.passthrough
        if passthrough is None:
            return b""
        used = self._usage_comment() if passthrough.is_event_stream and passthrough.is_between_events else b""
        if not self._streams:  # though the headers announce events
            return self._error_format.event(_unexpected_response(passthrough), 0)
        return (self._late_headers() if self._owes_timing else b"") + used

    def _insert_timing(self, data: bytes) -> bytes:
        """Insert the timing before `[DONE]`, where OpenAI's clients stop."""
        end = data.rfind(DONE) if self._owes_timing else -1
        if end < 0 or data[max(0, end - 1) : end] not in (b"", b"\n"):
            return data
        self._owes_timing = False
        return data[:end] + self._late_headers() + data[end:]

    async def _whole_response(self) -> Response:
        request, passthrough = self._request, self._request.response.passthrough
        own = extra_headers(request)
        if self._settings.usage_headers and (used := format_usage(request)):
            own[USAGE_HEADER] = used
        if passthrough is not None:
            body, headers = passthrough.take(), passthrough_headers(passthrough) | own
            if (error := convert_error(passthrough, body, self._error_format)) is not None:
                return json_response(error, passthrough.head.status, headers | {"content-type": "application/json"})
            return Response(body, passthrough.head.status, headers)
        assert not isinstance(self._sink, EventStream)
        return Response(await self._sink.encode(), 200, own, "application/json")

    async def _send(self, data: bytes, send: Send, more: bool) -> None:
        await self._send_headers(send)
        response = self._request.response
        response.has_started = response.has_started or self._request.stats.first_token_at is not None
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._written_at = self._loop.time()

    async def _send_headers(self, send: Send) -> None:
        if self._headers_sent:
            return
        self._headers_sent = True
        request, passthrough = self._request, self._request.response.passthrough
        is_early = request.stats.first_token_at is None and passthrough is None
        self._announces_events, self._owes_timing = passthrough is None or passthrough.is_event_stream, is_early
        status, headers = 200, {"content-type": EVENT_STREAM}
        if passthrough is not None:
            status, headers = passthrough.head.status, passthrough_headers(passthrough)
        if self._announces_events:
            headers |= _UNBUFFERED
        headers |= request.headers if is_early else extra_headers(request)
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    # Comments during silence.

    def _late_headers(self) -> bytes:
        """Format as comments what headers that were sent early could not contain."""
        ignored = self._request.stats.ignored_parameters
        names = comment(f"x-thaw-ignored {ignored_names(self._request)}") if ignored else b""
        return names + comment(f"timing {server_timing(self._request)}")

    def _late_comments(self) -> bytes:
        """Format what precedes `[DONE]`: late headers, and what the request used."""
        late = self._late_headers() if self._owes_timing else b""
        return late + self._usage_comment()

    def _usage_comment(self) -> bytes:
        used = format_usage(self._request) if self._settings.usage_headers else ""
        return comment(f"usage {used}") if used else b""

    def _restart_timer(self) -> None:
        """The request waits for another instance: comment on that in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._settings.waking_comment_after, self._on_timer)

    def _on_timer(self) -> None:
        request, completion = self._request, self._request.completion
        if completion.is_done or not self._can_send_events:
            return
        has_output = request.stats.first_token_at is not None
        if not has_output or request.ticket.stage is Stage.QUEUED:
            self._comments += comment(self._progress(request))
            if not has_output and isinstance(self._sink, EventStream):
                self._sink.before_done = self._late_comments
            completion.wake()
            delay_s = self._settings.waking_comment_interval
        else:
            delay_s = self._settings.keep_alive_interval
            if self._loop.time() - self._written_at >= delay_s:
                self._comments += comment("keep-alive")
                completion.wake()
        self._timer = self._loop.call_later(delay_s, self._on_timer)


def _unexpected_response(passthrough: PassthroughResponse) -> ThawError:
    """Build the error for a response that is not an event stream where one was begun."""
    text = passthrough.take()[:2000].decode(errors="replace")
    kind = InvalidRequest if passthrough.head.status in range(400, 500) else EngineFailed
    return kind(f"The engine answered with status {passthrough.head.status}: {text}")
