"""The token path of a hosted engine: requests from NATS to its port, its answers back as they come, numbered without gaps."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import BaseModel, ValidationError

from services.enginehost.answers import Meter
from services.enginehost.asking import Asked, asked_for
from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, HttpError, Response
from services.enginehost.tracking import Tracker
from shared.contracts import subjects
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import (
    DATA_BYTES,
    ChoiceDelta,
    InferData,
    InferEnd,
    InferFailed,
    InferRequest,
    InferResponse,
    InferYielded,
    Usage,
)
from shared.contracts.migration import RunningRequest
from shared.contracts.phases import Phase
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InstanceBusy,
    InstanceDraining,
    InvalidRequest,
    NotFound,
    ShuttingDown,
    ThawError,
)
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
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
    tracker: Tracker | None = None
    fixed: str = "nothing has been heard of it yet"
    first_at: float | None = None

    def running(self) -> RunningRequest:
        tracker, now = self.tracker, time.monotonic()
        generated = tracker.generated if tracker is not None else 0
        here = len(tracker.tokens) if tracker is not None else 0
        rate = (here - 1) / (now - self.first_at) if self.first_at is not None and here > 1 and now > self.first_at else 0.0
        return RunningRequest(
            request_id=self.request_id,
            gateway_id=subjects.gateway_of(self.reply),
            prompt_tokens=tracker.prompt_tokens if tracker is not None else 0,
            generated_tokens=generated,
            tokens_per_second=rate,
            fixed=self.fixed,
            traceparent=self.parent,
        )


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
        asked = await asked_for(request, driver, client)
        response = await client.send(asked.outgoing)
        try:
            content_type = response.headers.get("content-type", "application/octet-stream")
            if asked.tracker is not None and response.status == 200 and content_type.startswith("text/event-stream"):
                usage = await self._follow(stream, response, asked, asked.tracker)
            else:
                fixed = asked.fixed or "it was not answered with a stream"
                self._send(stream, self._head(stream, response, fixed=fixed))
                meter = Meter(content_type, hide_usage=asked.hide_usage)
                await self._relay(stream, response, meter)
                usage = meter.usage
        finally:
            response.close()
        self._send(stream, InferEnd(seq=stream.seq, usage=usage))
        begun = asked.tracker.begun if asked.tracker is not None else None
        self._generated += usage.completion_tokens - (begun.kept if begun is not None else 0)
        self._completed += 1
        record_phases(stream.timeline.spans(), context_of(stream.parent))
        self._end(stream)

    def _head(self, stream: _Stream, response: Response, *, fixed: str) -> InferResponse:
        stream.fixed = fixed
        kept = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
        kind = response.headers.get("content-type", "application/octet-stream")
        return InferResponse(seq=stream.seq, status=response.status, content_type=kind, headers=kept, fixed=fixed)

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

    async def _follow(self, stream: _Stream, response: Response, asked: Asked, tracker: Tracker) -> Usage:
        """As `_relay`, with the tokens beside the bytes. The head waits for the first of them: it tells what the prompt was."""
        first = True
        while piece := await response.read():
            data, deltas = tracker.feed(piece)
            if not data and not deltas:
                continue
            if first:
                now = stream.first_at = time.monotonic()
                stream.timeline.add(Phase.PREFILL, stream.received, now)
                stream.tracker = tracker
                self._send(stream, self._tracked_head(stream, response, asked, tracker))
            self._send_data(stream, data, first, deltas)
            first = False
        if first:
            self._send(stream, self._head(stream, response, fixed="the stream was empty"))
        if data := tracker.finish():
            self._send_data(stream, data, first)
        return tracker.usage

    def _tracked_head(self, stream: _Stream, response: Response, asked: Asked, tracker: Tracker) -> InferResponse:
        head = self._head(stream, response, fixed="" if tracker.prompt else "the engine tells no token ids")
        more = {"seed": asked.seed, "prompt_tokens": tracker.prompt_tokens, "resume_head": tracker.head}
        return head.model_copy(update=more)

    def yield_(self, request_id: str) -> None:
        """End the request's stream after what has been told of it. Raises `NotFound`, or `Conflict` for what cannot be gone on with."""
        stream = self.stream(request_id)
        if stream.fixed:
            raise Conflict(stream.fixed)
        self._send(stream, InferYielded(seq=stream.seq))
        self._end(stream)

    def stream(self, request_id: str) -> _Stream:
        """Raises `NotFound`."""
        stream = self._streams.get(request_id)
        if stream is None:
            raise NotFound(f"request {request_id} is not here (any more)")
        return stream

    def running(self) -> tuple[RunningRequest, ...]:
        return tuple(s.running() for s in self._streams.values())

    def _send_data(self, stream: _Stream, data: bytes, first: bool, deltas: Sequence[ChoiceDelta] = ()) -> None:
        """`deltas` go with the last of the bytes: whoever goes on from them must have all of those."""
        starts = range(0, len(data), DATA_BYTES) or (0,)
        for start in starts:
            encoded = base64.b64encode(data[start : start + DATA_BYTES])
            progress = tuple(deltas) if start == starts[-1] else ()
            if first or progress:
                phases = stream.timeline.spans() if first else ()
                self._send(stream, InferData(seq=stream.seq, data=encoded.decode(), phases=phases, progress=progress))
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
