"""Requests that an instance serves and its outgoing responses, for every engine."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import BaseModel, ValidationError

from shared.contracts.engine import EngineLoad
from shared.contracts.inference import InferFailed, InferRequest
from shared.errors import Conflict, InstanceBusy, InvalidRequest, ShuttingDown, ThawError, Unavailable
from shared.messaging import Mesh
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
OUTBOX_BYTES = 64 << 20
"""Most bytes of responses that wait until NATS takes them: a stream with more fails.

They wait while the connection is slow or half-open. Without a connection, the client drops messages
beyond its own buffer.
"""


class Stream(Protocol):
    """An accepted request and its response stream.

    Attributes:
        request_id: The request.
        reply: Subject for the responses.
        seq: Number of the next message, without gaps.
    """

    request_id: str
    reply: str
    seq: int


S = TypeVar("S", bound=Stream)


class RequestServer(ABC, Generic[S]):
    """Accepts requests and sends responses. Runs on the event loop.

    Attributes:
        changed: Called when the first request starts and when the last one ends.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.changed: Callable[[], None] = lambda: None
        self.streams: dict[str, S] = {}
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._outbox_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._losses = LogRateLimit()
        self._completed = 0
        self._generated = 0
        self._idle_since = time.monotonic()
        self.draining = False
        self.drained = asyncio.Event()

    @abstractmethod
    def load(self) -> EngineLoad: ...

    @abstractmethod
    async def _handle_request(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        """Start serving a request. Returns quickly, because the next request waits for it.

        Args:
            request: The decoded request.
            reply: Subject for the responses.
            parent: The traceparent of the request, or None.
            size: Size of the encoded request in bytes.

        Raises:
            ThawError: The request is rejected with this error.
        """

    def _cancel_compute(self, stream: S) -> None:
        """Stop the engine's work on this request."""

    def _release(self, stream: S) -> None:
        """Release the resources of a request that has ended."""

    # State

    @property
    def idle_s(self) -> float:
        return 0.0 if self.streams else time.monotonic() - self._idle_since

    def raise_if_busy(self) -> None:
        """Raise `InstanceBusy` if any request is running."""
        if self.streams:
            raise InstanceBusy(f"{len(self.streams)} requests are being served")

    def drain(self, *, only_if_idle: bool) -> None:
        """Accept no new request.

        Raises:
            InstanceBusy: `only_if_idle` is set and requests are running.
        """
        if only_if_idle and not self.draining:
            self.raise_if_busy()
        self.draining = True
        if not self.streams:
            self._end_drain()

    def fail_all(self, error: ThawError) -> None:
        """Fail every running request with `error` at once."""
        for stream in list(self.streams.values()):
            self._cancel_compute(stream)
            self._fail(stream, error, engine_lost=True)

    def cancel(self, request_id: str) -> None:
        """Stop a request without a final message. Unknown ids are ignored."""
        stream = self.streams.get(request_id)
        if stream is not None:
            self._cancel_compute(stream)
            self._remove(stream)

    # Requests in

    async def on_message(self, message: Msg) -> None:
        """Handle a message on the instance's `infer` subject."""
        if not message.reply:
            return
        try:
            request = InferRequest.model_validate_json(message.data)
        except ValidationError as e:
            self._reject(message.reply, InvalidRequest(f"Malformed request: {e}"))
            return
        try:
            await self._handle_request(request, message.reply, (message.headers or {}).get("traceparent"), len(message.data))
        except ThawError as e:
            self._reject(message.reply, e)

    def _register(self, stream: S) -> None:
        """Add a stream. Raises `Conflict` if its request id is already running."""
        if stream.request_id in self.streams:
            raise Conflict(f"Request {stream.request_id} is already running on this instance")
        self.streams[stream.request_id] = stream
        if len(self.streams) == 1:
            self.changed()

    # Answers out

    def _fail(self, stream: S, error: ThawError, *, engine_lost: bool = False) -> None:
        """Send the error as the stream's last message. Ended streams are ignored."""
        if self.streams.get(stream.request_id) is stream:
            self._send(stream, InferFailed(seq=stream.seq, error=error.body(), engine_lost=engine_lost))
            self._remove(stream)

    def _remove(self, stream: S) -> None:
        if self.streams.pop(stream.request_id, None) is None:
            return
        self._release(stream)
        if not self.streams:
            self._idle_since = time.monotonic()
            self.changed()
            if self.draining:
                self._end_drain()

    def _end_drain(self) -> None:
        """A draining instance has no request, or its last one has ended."""
        self.drained.set()

    def _reject(self, reply: str, error: ThawError) -> None:
        self._put(reply, InferFailed(seq=0, error=error.body()).model_dump_json().encode())

    def _send(self, stream: S, message: BaseModel) -> None:
        self._enqueue(stream, message.model_dump_json().encode())

    def _enqueue(self, stream: S, body: bytes) -> None:
        """Queue a message. Those of ended streams are dropped."""
        if self.streams.get(stream.request_id) is not stream:
            return
        if self._outbox_bytes + len(body) > OUTBOX_BYTES:
            log.warning("NATS takes messages too slowly; failing a request", extra={"request_id": stream.request_id})
            error = Unavailable(
                f"NATS takes this instance's messages too slowly: {self._outbox_bytes >> 20} MiB of responses wait. Repeat the request"
            )
            self._cancel_compute(stream)
            self._put(stream.reply, InferFailed(seq=stream.seq, error=error.body()).model_dump_json().encode())
            self._remove(stream)
            return
        stream.seq += 1
        self._put(stream.reply, body)

    def _put(self, subject: str, body: bytes) -> None:
        self._outbox_bytes += len(body)
        if self._outbox_bytes > OUTBOX_BYTES // 2:
            self._has_room.clear()
        self._outbox.put_nowait((subject, body))

    async def _wait_for_room(self) -> None:
        """Wait while more than half of `OUTBOX_BYTES` wait for NATS.

        Others that waited may have filled the room again before this task runs.
        """
        while not self._has_room.is_set():
            await self._has_room.wait()

    async def publish_forever(self) -> None:
        """Send queued messages in order.

        While NATS is unreachable the client buffers them. Messages beyond its buffer are lost, and
        the receiver sees the gap in `seq`.
        """
        while True:
            subject, body = await self._outbox.get()
            try:
                await self._mesh.nc.publish(subject, body)
            except NatsError as e:
                if self._losses.allows(type(e).__name__):
                    log.warning("lost response messages", extra={"error": repr(e), "subject": subject})
            finally:
                self._outbox_bytes -= len(body)
                if self._outbox_bytes <= OUTBOX_BYTES // 2:
                    self._has_room.set()
                self._outbox.task_done()

    async def flush(self) -> None:
        await self._outbox.join()


def stopped_error() -> ShuttingDown:
    return ShuttingDown("The engine was stopped while it was answering")
