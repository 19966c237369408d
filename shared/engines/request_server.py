"""The requests that an instance is serving, and its answers on their way out: what is the same whichever engine computes them."""

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
from shared.errors import Conflict, InstanceBusy, InvalidRequest, ShuttingDown, ThawError
from shared.messaging import Mesh

log = logging.getLogger(__name__)


class Stream(Protocol):
    """One request that has been taken on. `seq`: the number of its next answer, without gaps."""

    request_id: str
    reply: str
    seq: int


S = TypeVar("S", bound=Stream)


class Answering(ABC, Generic[S]):
    """Lives on the event loop. `changed`: called when there is a first request, and when there is none any more."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.changed: Callable[[], None] = lambda: None
        self.streams: dict[str, S] = {}
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._completed = 0
        self._generated = 0
        self._idle_since = time.monotonic()
        self.draining = False
        self.drained = asyncio.Event()

    @abstractmethod
    def load(self) -> EngineLoad: ...

    @abstractmethod
    async def _take(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        """Begin with a request of `size` bytes; soon over, since the next one waits for it. What it raises refuses the request. `parent`: its
        traceparent."""

    def _stop(self, stream: S) -> None:
        """The engine need not compute it any more."""

    def _release(self, stream: S) -> None:
        """Give back what the request held: it has ended, however it did."""

    # State

    @property
    def idle_s(self) -> float:
        return 0.0 if self.streams else time.monotonic() - self._idle_since

    def refuse_if_busy(self) -> None:
        """Raises `InstanceBusy`."""
        if self.streams:
            raise InstanceBusy(f"{len(self.streams)} requests are being served")

    def drain(self, *, only_if_idle: bool) -> None:
        """Take no new request. Raises `InstanceBusy` if there are any and it was to be only if idle."""
        if only_if_idle and not self.draining:
            self.refuse_if_busy()
        self.draining = True
        if not self.streams:
            self.drained.set()

    def abandon(self, error: ThawError) -> None:
        """End everything that is still running with an error, at once."""
        for stream in list(self.streams.values()):
            self._stop(stream)
            self._fail(stream, error, engine_lost=True)

    def cancel(self, request_id: str) -> None:
        """Stop without a last message; harmless if there is no such request."""
        stream = self.streams.get(request_id)
        if stream is not None:
            self._stop(stream)
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
        try:
            await self._take(request, message.reply, (message.headers or {}).get("traceparent"), len(message.data))
        except ThawError as e:
            self._refuse(message.reply, e)

    def _begin(self, stream: S) -> None:
        """Raises `Conflict` for a request that is here already."""
        if stream.request_id in self.streams:
            raise Conflict(f"request {stream.request_id} is running here already")
        self.streams[stream.request_id] = stream
        if len(self.streams) == 1:
            self.changed()

    # Answers out

    def _fail(self, stream: S, error: ThawError, *, engine_lost: bool = False) -> None:
        """Its last message; harmless if it has ended."""
        if self.streams.get(stream.request_id) is stream:
            self._send(stream, InferFailed(seq=stream.seq, error=error.body(), engine_lost=engine_lost))
            self._end(stream)

    def _end(self, stream: S) -> None:
        if self.streams.pop(stream.request_id, None) is None:
            return
        self._release(stream)
        if not self.streams:
            self._idle_since = time.monotonic()
            self.changed()
            if self.draining:
                self.drained.set()

    def _refuse(self, reply: str, error: ThawError) -> None:
        self._outbox.put_nowait((reply, InferFailed(seq=0, error=error.body()).model_dump_json().encode()))

    def _send(self, stream: S, message: BaseModel) -> None:
        self._put(stream, message.model_dump_json().encode())

    def _put(self, stream: S, body: bytes) -> None:
        stream.seq += 1
        self._outbox.put_nowait((stream.reply, body))

    async def publish_forever(self) -> None:
        """Send what is in the outbox, in order. While NATS is away the client buffers; what it cannot hold is lost, and its receiver
        sees the gap."""
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
