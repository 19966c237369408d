"""The token path of a hosted engine: requests from NATS to its port, its answers back as they come, numbered without gaps."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import BaseModel, ValidationError

from services.enginehost.answers import Meter
from services.enginehost.drivers.port import Driver, json_request
from services.enginehost.http1 import Client, HttpError, HttpRequest, Response
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import DATA_BYTES, InferData, InferEnd, InferFailed, InferRequest, InferResponse
from shared.contracts.phases import Phase
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InstanceBusy,
    InstanceDraining,
    InvalidRequest,
    ShuttingDown,
    ThawError,
)
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings"}
_KEPT_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


@dataclass
class _Stream:
    """One request that has been taken on."""

    request_id: str
    reply: str
    parent: str | None
    received: float
    timeline: Timeline = field(default_factory=lambda: Timeline("enginehost"))
    seq: int = 0
    task: asyncio.Task[None] | None = None


class Serving:
    """Lives on the event loop. Until `open` is called, and after `close`, requests are refused as not ready."""

    def __init__(self, mesh: Mesh, changed: Callable[[], None]) -> None:
        self._mesh = mesh
        self._changed = changed
        self._streams: dict[str, _Stream] = {}
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._driver: Driver | None = None
        self._client: Client | None = None
        self._completed = 0
        self._generated = 0
        self._idle_since = time.monotonic()
        self.draining = False
        self.drained = asyncio.Event()

    def open(self, driver: Driver, client: Client) -> None:
        self._driver, self._client = driver, client
        self._idle_since = time.monotonic()

    def close(self) -> None:
        """Refuse requests until `open`. Raises `InstanceBusy` if any is being served."""
        if self._streams:
            raise InstanceBusy(f"{len(self._streams)} requests are being served")
        self._driver = self._client = None

    # State

    @property
    def idle_s(self) -> float:
        return 0.0 if self._streams else time.monotonic() - self._idle_since

    def load(self) -> EngineLoad:
        return EngineLoad(
            active=len(self._streams),
            completed=self._completed,
            generated_tokens=self._generated,
            idle_ms=int(self.idle_s * 1000),
        )

    def drain(self, *, only_if_idle: bool) -> None:
        """Take no new request. Raises `InstanceBusy` if there are any and it was to be only if idle."""
        if only_if_idle and self._streams and not self.draining:
            raise InstanceBusy(f"{len(self._streams)} requests are being served")
        self.draining = True
        if not self._streams:
            self.drained.set()

    def abandon(self, error: ThawError) -> None:
        """End everything that is still running with an error, at once."""
        for stream in list(self._streams.values()):
            self._fail(stream, error, engine_lost=True)

    def cancel(self, request_id: str) -> None:
        """Stop without a last message; the engine sees its connection closed. Harmless if there is no such request."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._end(stream)

    # Requests in

    async def on_message(self, message: Msg) -> None:
        """Callback of the subscription to the instance's `infer` subject."""
        if not message.reply:
            return
        try:
            request = InferRequest.model_validate_json(message.data)
        except ValidationError as e:
            self._refuse(message.reply, InvalidRequest(f"malformed request: {e}"))
            return
        if self.draining or self._driver is None or self._client is None:
            self._refuse(message.reply, InstanceDraining("" if self.draining else "the instance is not ready"))
            return
        if request.request_id in self._streams:
            self._refuse(message.reply, Conflict(f"request {request.request_id} is running here already"))
            return
        parent = (message.headers or {}).get("traceparent")
        stream = _Stream(request.request_id, message.reply, parent, time.monotonic())
        self._streams[stream.request_id] = stream
        if len(self._streams) == 1:
            self._changed()
        stream.task = asyncio.create_task(
            self._serve(stream, request, self._driver, self._client), name=f"request {request.request_id}"
        )

    async def _serve(self, stream: _Stream, request: InferRequest, driver: Driver, client: Client) -> None:
        try:
            async with asyncio.timeout(request.deadline_ms / 1000):
                await self._forward(stream, request, driver, client)
        except TimeoutError:
            self._fail(stream, DeadlineExceeded("the answer was not complete within the request's deadline"))
        except HttpError as e:
            self._fail(stream, EngineFailed(f"the engine did not answer to the end: {e}"), engine_lost=True)
        except ThawError as e:
            self._fail(stream, e)
        except Exception as e:  # a process boundary: the request must have an answer
            log.exception("a request failed", extra={"request_id": stream.request_id})
            self._fail(stream, EngineFailed(f"{type(e).__name__}: {str(e)[:300]}"))

    async def _forward(self, stream: _Stream, request: InferRequest, driver: Driver, client: Client) -> None:
        outgoing, hide_usage = translate(request, driver)
        response = await client.send(outgoing)
        try:
            content_type = response.headers.get("content-type", "application/octet-stream")
            kept = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
            self._send(stream, InferResponse(seq=stream.seq, status=response.status, content_type=content_type, headers=kept))
            meter = Meter(content_type, hide_usage=hide_usage)
            await self._relay(stream, response, meter)
        finally:
            response.close()
        self._send(stream, InferEnd(seq=stream.seq, usage=meter.usage))
        self._generated += meter.usage.completion_tokens
        self._completed += 1
        record_phases(stream.timeline.spans(), context_of(stream.parent))
        self._end(stream)

    async def _relay(self, stream: _Stream, response: Response, meter: Meter) -> None:
        first = True
        while piece := await response.read():
            if first:
                stream.timeline.add(Phase.PREFILL, stream.received, time.monotonic())
            if data := meter.feed(piece):
                self._send_data(stream, data, first)
                first = False
        if data := meter.finish():
            self._send_data(stream, data, first)

    def _send_data(self, stream: _Stream, data: bytes, first: bool) -> None:
        for start in range(0, len(data), DATA_BYTES):
            encoded = base64.b64encode(data[start : start + DATA_BYTES])
            if first:
                self._send(stream, InferData(seq=stream.seq, data=encoded.decode(), phases=stream.timeline.spans()))
                first = False
            else:  # one of thousands: made without a model
                self._put(stream, b'{"v":"1.0","kind":"data","seq":%d,"data":"%b"}' % (stream.seq, encoded))

    # Answers out

    def _fail(self, stream: _Stream, error: ThawError, *, engine_lost: bool = False) -> None:
        if self._streams.get(stream.request_id) is stream:
            self._send(stream, InferFailed(seq=stream.seq, error=error.body(), engine_lost=engine_lost))
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        if self._streams.pop(stream.request_id, None) is None:
            return
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()
        if not self._streams:
            self._idle_since = time.monotonic()
            self._changed()
            if self.draining:
                self.drained.set()

    def _send(self, stream: _Stream, message: BaseModel) -> None:
        self._put(stream, message.model_dump_json().encode())

    def _put(self, stream: _Stream, body: bytes) -> None:
        stream.seq += 1
        self._outbox.put_nowait((stream.reply, body))

    def _refuse(self, reply: str, error: ThawError) -> None:
        self._outbox.put_nowait((reply, InferFailed(seq=0, error=error.body()).model_dump_json().encode()))

    async def publish_forever(self) -> None:
        """Send what is in the outbox, in order. What NATS cannot take is lost, and its receiver sees the gap."""
        while True:
            subject, body = await self._outbox.get()
            try:
                await self._mesh.nc.publish(subject, body)
            except NatsError as e:
                log.warning("an answer was lost", extra={"error": repr(e), "subject": subject})
            finally:
                self._outbox.task_done()

    async def flush(self) -> None:
        await self._outbox.join()


def stopped() -> ShuttingDown:
    return ShuttingDown("the engine was stopped while it was answering")


def translate(request: InferRequest, driver: Driver) -> tuple[HttpRequest, bool]:
    """What the engine is asked, and whether the usage it tells in its stream is for us only."""
    if request.endpoint == "other":
        path = request.route + (f"?{request.query}" if request.query else "")
        if request.data is not None:
            headers = {**request.headers, "content-type": request.content_type}
            return HttpRequest(request.method, path, base64.b64decode(request.data), headers), False
        if request.method in ("GET", "DELETE"):
            return HttpRequest(request.method, path, headers=request.headers), False
        outgoing = json_request(path, driver.body(request.body), request.method)
        return HttpRequest(outgoing.method, path, outgoing.body, {**request.headers, **outgoing.headers}), False
    body = driver.body(request.body)
    hide = False
    if body.get("stream") and driver.stream_usage:
        options = body.get("stream_options") or {}
        hide = not options.get("include_usage")
        body["stream_options"] = {**options, "include_usage": True}
    return json_request(_PATHS[request.endpoint], body), hide
