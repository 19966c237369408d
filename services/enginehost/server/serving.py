"""The request path of a hosted engine.

Requests go from NATS to its port, and numbered responses back.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from services.enginehost.drivers.port import Driver
from services.enginehost.http1 import Client, HttpError, Response
from services.enginehost.server.busy_time import BusyTime
from services.enginehost.server.held_body import HeldBodyReader
from services.enginehost.server.token_tracker import TokenTracker
from services.enginehost.server.upstream_request import UpstreamRequest, build_upstream_request
from services.enginehost.server.usage_meter import UsageMeter
from shared.contracts import subjects
from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.contracts.inference import (
    DATA_BYTES,
    ChoiceDelta,
    InferData,
    InferEnd,
    InferRequest,
    InferResponse,
    InferYielded,
    Usage,
)
from shared.contracts.migration import RunningRequest
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase
from shared.engines.adapter_cache import AdapterCache
from shared.engines.background_seconds import OWN, add_background_seconds
from shared.engines.charge_page import ChargePage
from shared.engines.request_server import RequestServer
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    EngineKilled,
    InstanceDraining,
    NotFound,
    ThawError,
    UnsupportedParameter,
)
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_KEPT_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
_LOST = "it sent an error, and is not healthy"
_ERROR_EVENT = re.compile(rb'^(?:event: ?[^\n]*\n)?data: ?\{"(?:error"|type": ?"error")', re.MULTILINE)


@dataclass
class _Stream:
    """An accepted request."""

    request_id: str
    reply: str
    parent: str | None
    received: float
    timeline: Timeline = field(default_factory=lambda: Timeline("enginehost"))
    seq: int = 0
    task: asyncio.Task[None] | None = None
    tracker: TokenTracker | None = None
    fixed: str = "the engine has not answered yet"
    first_at: float | None = None
    cache_salt: str = ""
    adapter: ModelCard | None = None
    device_s: float = 0.0
    """Seconds of the device that were last reported."""

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


async def _was_not_killed() -> bool:
    return False


class Serving(RequestServer[_Stream]):
    """Requests of one hosted engine.

    They are rejected as not ready before `open` and after `close`.
    """

    def __init__(self, mesh: Mesh, page: ChargePage | None = None) -> None:
        """Create a server without an engine.

        Args:
            mesh: The connection to NATS.
            page: Gets the meters; None: nothing does.
        """
        super().__init__(mesh)
        self._page = page
        self._bodies = HeldBodyReader(mesh)
        self._busy = BusyTime()
        self._closed_s = 0.0
        """Seconds of ended requests that were sent to their gateways."""
        self._background_s: dict[str, float] = {}
        """Seconds that are charged to no request, by the plan that caused them."""
        self._all_background_s = 0.0
        self._driver: Driver | None = None
        self._client: Client | None = None
        self.adapters: AdapterCache[str] | None = None
        """The LoRA adapters that the engine holds; None: it serves none."""
        self.was_killed: Callable[[], Awaitable[bool]] = _was_not_killed
        """Returns whether the engine has just been killed from outside."""
        self.is_lost: Callable[[], Awaitable[bool]] = _was_not_killed
        """Returns whether the engine has ended behind its server, which answers with errors."""

    def open(self, driver: Driver, client: Client) -> None:
        self._driver, self._client = driver, client
        self._idle_since = time.monotonic()

    def close(self) -> None:
        """Reject requests until `open`. Raises `InstanceBusy` while any is running."""
        self.raise_if_busy()
        self._driver = self._client = None

    def load(self) -> EngineLoad:
        self._write_meters()
        return EngineLoad(
            active=len(self.streams),
            completed=self._completed,
            generated_tokens=self._generated,
            busy_s=round(self._busy.read_total(time.monotonic()), 6),
            background=tuple(BackgroundWork(plan_id=cause, seconds=round(s, 6)) for cause, s in self._background_s.items()),
            charged_s=round(self._closed_s, 6),
            idle_ms=int(self.idle_s * 1000),
            adapters=self.adapters.list_loaded() if self.adapters is not None else (),
        )

    # Requests in

    async def _handle_request(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        if self.draining or self._driver is None or self._client is None:
            raise InstanceDraining("" if self.draining else "The instance is not ready")
        stream = _Stream(request.request_id, reply, parent, time.monotonic(), adapter=request.adapter)
        self._register(stream)
        name = f"request {request.request_id}"
        stream.task = asyncio.create_task(self._serve(stream, request, self._driver, self._client), name=name)

    def _cancel_compute(self, stream: _Stream) -> None:
        """End a request that is failed by its own task: `_release` ends those of others."""
        own = asyncio.current_task()
        if own is not None and stream.task is own:
            own.cancel()

    def _release(self, stream: _Stream) -> None:
        """Cancel the request's task: the engine sees the closed connection."""
        if stream.task is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()

    async def _serve(self, stream: _Stream, request: InferRequest, driver: Driver, client: Client) -> None:
        try:
            async with asyncio.timeout(request.deadline_ms / 1000), self.loaded(request.adapter):
                await self._forward(stream, request, driver, client)
        except TimeoutError:
            self._fail(stream, DeadlineExceeded("The response was not complete within the request's deadline"))
        except HttpError as e:
            await self._fail_lost(stream, f"The engine did not complete its response: {e}")
        except ThawError as e:
            if isinstance(e.__cause__, HttpError):  # it broke down before it got the request
                await self._fail_lost(stream, e.message)
            else:
                self._fail(stream, e)
        except Exception as e:  # a process boundary: the request must get a response
            log.exception("a request failed", extra={"request_id": stream.request_id})
            self._fail(stream, EngineFailed(f"{type(e).__name__}: {str(e)[:300]}"))

    async def _fail_lost(self, stream: _Stream, message: str) -> None:
        kind = EngineKilled if await self.was_killed() else EngineFailed
        self._fail(stream, kind(message), engine_lost=True)

    @asynccontextmanager
    async def loaded(self, adapter: ModelCard | None) -> AsyncIterator[None]:
        """Have the engine hold `adapter` meanwhile. Raises `ThawError`."""
        if adapter is None:
            yield
            return
        if self.adapters is None:
            raise UnsupportedParameter(
                f"This instance of {adapter.spec.base} was started without LoRA adapters. Start it again (thaw sleep, thaw wake)",
                param="model",
            )
        await self.adapters.acquire(adapter)
        try:
            yield
        finally:
            self.adapters.release(adapter.info.revision)

    async def _forward(self, stream: _Stream, request: InferRequest, driver: Driver, client: Client) -> None:
        upstream = await build_upstream_request(request, driver, client)
        stream.cache_salt = upstream.salt
        outgoing = upstream.outgoing
        if request.held is not None:
            outgoing = self._bodies.attach(outgoing, request.held)
        self._busy.begin(stream.request_id, time.monotonic())
        try:
            usage = await self._receive(stream, await client.send(outgoing), upstream)
        except BaseException:
            self._count_background(self._busy.end(stream.request_id, time.monotonic()) - stream.device_s)
            self._closed_s += stream.device_s
            raise
        device_s = self._busy.end(stream.request_id, time.monotonic())
        self._closed_s += device_s
        self._write_meters()
        self._send(stream, InferEnd(seq=stream.seq, usage=usage.model_copy(update={"device_s": round(device_s, 6)})))
        resume_state = upstream.tracker.resume_state if upstream.tracker is not None else None
        self._generated += usage.completion_tokens - (resume_state.kept if resume_state is not None else 0)
        self._completed += 1
        record_phases(stream.timeline.spans(), context_of(stream.parent))
        self._remove(stream)

    @contextmanager
    def work(self, name: str, caused_by: str) -> Iterator[None]:
        """Count the engine's work meanwhile as that of no request.

        Args:
            name: Of the work, other than those of requests.
            caused_by: The plan that made it necessary, or `OWN`.
        """
        self._busy.begin(name, time.monotonic())
        try:
            yield
        finally:
            self._count_background(self._busy.end(name, time.monotonic()), caused_by)

    def _write_meters(self) -> None:
        if self._page is not None:
            total_s = self._busy.read_total(time.monotonic())
            self._page.write_steps(total_s, total_s - self._all_background_s, self._background_s.get(OWN, 0.0))

    def _count_background(self, seconds: float, caused_by: str = OWN) -> None:
        if seconds > 0:
            add_background_seconds(self._background_s, caused_by, seconds)
            self._all_background_s += seconds

    async def _receive(self, stream: _Stream, response: Response, upstream: UpstreamRequest) -> Usage:
        """Relay a response, and return its usage."""
        try:
            if response.status >= 500 and await self.is_lost():
                raise HttpError(f"it answered with status {response.status}, and is not healthy")
            content_type = response.headers.get("content-type", "application/octet-stream")
            if upstream.tracker is not None and response.status == 200 and content_type.startswith("text/event-stream"):
                return await self._follow(stream, response, upstream, upstream.tracker)
            fixed = upstream.fixed or "the response is not a stream"
            self._send(stream, self._head(stream, response, fixed=fixed))
            meter = UsageMeter(content_type, hide_usage=upstream.hide_usage)
            await self._relay(stream, response, meter)
            return meter.usage
        finally:
            response.close()

    def _head(self, stream: _Stream, response: Response, *, fixed: str) -> InferResponse:
        stream.fixed = fixed
        kept = {k: response.headers[k] for k in _KEPT_HEADERS if k in response.headers}
        kind = response.headers.get("content-type", "application/octet-stream")
        return InferResponse(seq=stream.seq, status=response.status, content_type=kind, headers=kept, fixed=fixed)

    async def _relay(self, stream: _Stream, response: Response, meter: UsageMeter) -> None:
        first = True
        while piece := await self._read(response):
            if first:
                stream.timeline.add(Phase.PREFILL, stream.received, time.monotonic())
            data, is_lost = await self._cut_at_loss(meter.feed(piece))
            if data:
                self._send_data(stream, data, first)
                first = False
            if is_lost:
                raise HttpError(_LOST)
        if data := meter.finish():
            self._send_data(stream, data, first)

    async def _read(self, response: Response) -> bytes:
        """Read the next bytes of a response, once NATS has taken those before."""
        await self._wait_for_room()
        return await response.read()

    async def _cut_at_loss(self, data: bytes) -> tuple[bytes, bool]:
        """Return the bytes before an error event of a lost engine, and whether there is one."""
        found = _ERROR_EVENT.search(data)
        if found is None or not await self.is_lost():
            return data, False
        return data[: found.start()], True

    async def _follow(self, stream: _Stream, response: Response, upstream: UpstreamRequest, tracker: TokenTracker) -> Usage:
        """Relay a response together with its token ids.

        The response head waits for the first token, whose event carries the prompt's token ids.
        """
        first = True
        while piece := await self._read(response):
            data, deltas = tracker.feed(piece)
            data, is_lost = await self._cut_at_loss(data)
            if data or deltas:
                if first:
                    now = stream.first_at = time.monotonic()
                    stream.timeline.add(Phase.PREFILL, stream.received, now)
                    stream.tracker = tracker
                    self._send(stream, self._tracked_head(stream, response, upstream, tracker))
                self._send_data(stream, data, first, deltas)
                first = False
            if is_lost:
                raise HttpError(_LOST)
        if first:
            self._send(stream, self._head(stream, response, fixed="the stream was empty"))
        if data := tracker.finish():
            self._send_data(stream, data, first)
        return tracker.usage

    def _tracked_head(self, stream: _Stream, response: Response, upstream: UpstreamRequest, tracker: TokenTracker) -> InferResponse:
        head = self._head(stream, response, fixed="" if tracker.prompt else "the engine reports no token ids")
        resumed = tracker.resume_state
        kept = resumed.kept if resumed is not None and resumed.replaces_tokens else None
        more = {"seed": upstream.seed, "prompt_tokens": tracker.prompt_tokens, "resume_head": tracker.head, "kept_tokens": kept}
        return head.model_copy(update=more)

    def yield_(self, request_id: str) -> None:
        """End the request's stream after the tokens sent so far.

        Raises:
            NotFound: The request is not running here.
            Conflict: The request cannot be resumed elsewhere.
        """
        stream = self.stream(request_id)
        if stream.fixed:
            raise Conflict(stream.fixed)
        self._send(stream, InferYielded(seq=stream.seq))
        self._remove(stream)

    def stream(self, request_id: str) -> _Stream:
        """The running request of this id. Raises `NotFound`."""
        stream = self.streams.get(request_id)
        if stream is None:
            raise NotFound(f"Request {request_id} is not running on this instance")
        return stream

    def running(self) -> tuple[RunningRequest, ...]:
        return tuple(s.running() for s in self.streams.values())

    def _send_data(self, stream: _Stream, data: bytes, first: bool, deltas: Sequence[ChoiceDelta] = ()) -> None:
        """Send bytes in messages of limited size.

        Args:
            stream: The response.
            data: The bytes.
            first: True if these are the first bytes of the response.
            deltas: Sent with the last message, because an engine that resumes from them needs all
                their bytes.
        """
        starts = range(0, len(data), DATA_BYTES) or (0,)
        for start in starts:
            encoded = base64.b64encode(data[start : start + DATA_BYTES])
            progress = tuple(deltas) if start == starts[-1] else ()
            if first or progress:
                phases = stream.timeline.spans() if first else ()
                device_s = stream.device_s = round(self._busy.of_request(stream.request_id, time.monotonic()), 6)
                self._write_meters()
                message = InferData(seq=stream.seq, data=encoded.decode(), phases=phases, progress=progress, device_s=device_s)
                self._send(stream, message)
                first = False
            else:  # one of thousands: generated without a model
                self._enqueue(stream, b'{"v":"1.0","kind":"data","seq":%d,"data":"%b"}' % (stream.seq, encoded))
