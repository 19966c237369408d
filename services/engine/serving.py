"""The token path: requests from NATS to the computing thread, and what comes of them back, numbered without gaps."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from services.engine.adapters import Adapters
from services.engine.batcher import Batcher
from services.engine.events import Admitted, Broken, Embedded, Event, Progressed, Yielded
from services.engine.requests import EmbedRequest, GenerationRequest, RequestReader
from services.engine.streams import Stream, fixed_of
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import (
    EmbeddingsFinished,
    InferChunk,
    InferFailed,
    InferFinished,
    InferRequest,
    InferStarted,
    InferYielded,
    Usage,
)
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    EngineFailed,
    InstanceBusy,
    InstanceDraining,
    InvalidRequest,
    PayloadTooLarge,
    ShuttingDown,
    ThawError,
)
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_INLINE_BYTES = 16 * 1024
"""Bodies over this are tokenised in a thread, so that the loop goes on."""
Reply = InferStarted | InferChunk | InferFinished | InferYielded | EmbeddingsFinished | InferFailed


class Serving:
    """Lives on the event loop. `batcher` is set once the model is loaded; until then requests are refused as not ready."""

    def __init__(self, mesh: Mesh, instance_id: str, changed: Callable[[], None]) -> None:
        self._mesh = mesh
        self._instance_id = instance_id
        self._changed = changed
        self.streams: dict[str, Stream] = {}
        self.reader: RequestReader | None = None
        self.batcher: Batcher | None = None
        self.adapters: Adapters | None = None
        self._outbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._block_bytes = 0
        self._completed = 0
        self._generated = 0
        self._idle_since = time.monotonic()
        self.draining = False
        self._held = False
        self.drained = asyncio.Event()

    def open(self, reader: RequestReader, batcher: Batcher, block_bytes: int, adapters: Adapters | None = None) -> None:
        """`adapters` None: this model takes none."""
        self.reader, self.batcher, self._block_bytes, self.adapters = reader, batcher, block_bytes, adapters
        self._idle_since = time.monotonic()

    # State

    def load(self) -> EngineLoad:
        active = sum(s.admitted is not None for s in self.streams.values())
        idle = 0 if self.streams else int((time.monotonic() - self._idle_since) * 1000)
        return EngineLoad(
            active=active,
            waiting=len(self.streams) - active,
            completed=self._completed,
            generated_tokens=self._generated,
            kv_bytes_used=self.batcher.blocks_used * self._block_bytes if self.batcher is not None else 0,
            idle_ms=idle,
            adapters=self.adapters.loaded() if self.adapters is not None else (),
        )

    def drain(self, *, only_if_idle: bool) -> None:
        """Take no new request. Raises `InstanceBusy` if there are any and it was to be only if idle."""
        if only_if_idle and self.streams and not self.draining:
            raise InstanceBusy(f"{len(self.streams)} requests are being served")
        self.draining = True
        self._note_drained()

    def hold(self) -> None:
        """Take no new request until `let_go`. Raises `InstanceBusy` if there are any."""
        if self.streams:
            raise InstanceBusy(f"{len(self.streams)} requests are being served")
        self._held = True

    def let_go(self) -> None:
        self._held = False

    async def take_own(self, request: InferRequest, reply: str) -> None:
        """Serve a request of the engine's own, held or not."""
        stream = Stream(request.request_id, reply, None, Timeline("engine"), time.monotonic())
        await self._take(stream, request, 0)

    def abandon(self) -> None:
        """End everything that is still running with an error, at once."""
        for stream in list(self.streams.values()):
            if self.batcher is not None:
                self.batcher.cancel(stream.request_id)
            self._fail(stream, ShuttingDown("the engine was stopped while it was answering"), lost=True)

    def cancel(self, request_id: str) -> None:
        """Stop without a last message; harmless if there is no such request."""
        stream = self.streams.get(request_id)
        if stream is not None:
            if self.batcher is not None:
                self.batcher.cancel(request_id)
            self._end(stream)

    def yield_(self, stream: Stream) -> None:
        """Stop at the next token, to go on elsewhere; what has not been given to the computing thread stops at once."""
        if isinstance(stream.request, GenerationRequest) and stream.fetching is None and self.batcher is not None:
            self.batcher.yield_(stream.request_id)
        else:
            self._yielded(stream)

    def _yielded(self, stream: Stream) -> None:
        self._send(stream, InferYielded(seq=stream.seq))
        self._end(stream)

    def _note_drained(self) -> None:
        if self.draining and not self.streams:
            self.drained.set()

    # Requests in

    async def on_message(self, message: Msg) -> None:
        """Callback of the subscription to the instance's `infer` subject."""
        if not message.reply:
            return
        parent = (message.headers or {}).get("traceparent")
        try:
            request = InferRequest.model_validate_json(message.data)
        except ValidationError as e:
            self._publish(message.reply, InferFailed(seq=0, error=InvalidRequest(f"malformed request: {e}").body()))
            return
        stream = Stream(request.request_id, message.reply, parent, Timeline("engine"), time.monotonic())
        try:
            await self._take(stream, request, len(message.data))
        except ThawError as e:
            if self.streams.get(stream.request_id) is stream:
                self._fail(stream, e)
            else:
                self._publish(stream.reply, InferFailed(seq=stream.seq, error=e.body()))

    async def _take(self, stream: Stream, request: InferRequest, size: int) -> None:
        if self.draining or (self._held and size):
            raise InstanceDraining
        if self.reader is None or self.batcher is None:
            raise InstanceDraining("the instance is not ready yet")
        if stream.request_id in self.streams:
            raise Conflict(f"request {stream.request_id} is running here already")
        if request.adapter is not None and (self.adapters is None or request.endpoint == "embedding"):
            raise InvalidRequest(f"{request.adapter.name} is an adapter for generating; this cannot use it", param="model")
        loop = asyncio.get_running_loop()
        stream.adapter = request.adapter
        self.streams[stream.request_id] = stream
        if len(self.streams) == 1:
            self._changed()
        stream.deadline = loop.call_later(request.deadline_ms / 1000, self._expire, stream)
        if size <= _INLINE_BYTES:
            self._submit(stream, self._read(self.reader, request))
            return
        # Not awaited: the subscription's callbacks run one after the other.
        job = loop.run_in_executor(self._threads, self._read, self.reader, request)
        job.add_done_callback(lambda done: self._read_done(stream, done))

    def _read(self, reader: RequestReader, request: InferRequest) -> GenerationRequest | EmbedRequest:
        try:
            return reader.read(request)
        except ThawError:
            raise
        except Exception as e:  # a tokenizer or a template may raise anything; the request must have an answer
            log.exception("a request could not be read", extra={"request_id": request.request_id})
            raise EngineFailed(f"the request could not be read: {type(e).__name__}: {str(e)[:300]}") from e

    def _read_done(self, stream: Stream, done: asyncio.Future[GenerationRequest | EmbedRequest]) -> None:
        if self.streams.get(stream.request_id) is not stream or done.cancelled():
            return
        error = done.exception()
        if isinstance(error, ThawError):
            self._fail(stream, error)
        elif error is None:
            self._submit(stream, done.result())
        else:
            raise error

    def _submit(self, stream: Stream, request: GenerationRequest | EmbedRequest) -> None:
        assert self.batcher is not None
        stream.take(request)
        if stream.adapter is None or not isinstance(request, GenerationRequest):
            self.batcher.submit(request)
        else:
            name = f"adapter for {stream.request_id}"
            stream.fetching = asyncio.create_task(self._submit_with(stream.adapter, stream, request), name=name)

    async def _submit_with(self, card: ModelCard, stream: Stream, request: GenerationRequest) -> None:
        """Compute the request once its adapter is there."""
        assert self.batcher is not None
        assert self.adapters is not None
        try:
            adapter = await self.adapters.acquire(card)
        except Exception as e:  # the task's boundary: whatever it was, the request must have an answer
            if not isinstance(e, ThawError):
                log.exception("an adapter could not be loaded", extra={"adapter": card.name})
                e = EngineFailed(f"the adapter {card.name} could not be loaded: {type(e).__name__}: {str(e)[:300]}")
            stream.fetching = None
            if self.streams.get(stream.request_id) is stream:
                self._fail(stream, e)
            return
        stream.fetching, stream.holds_adapter = None, True
        self.batcher.submit(replace(request, adapter=adapter, variant=card.info.revision))

    def _expire(self, stream: Stream) -> None:
        if self.streams.get(stream.request_id) is stream:
            if self.batcher is not None:
                self.batcher.cancel(stream.request_id)
            self._fail(stream, DeadlineExceeded("the answer was not complete within the request's deadline"))

    # Answers out

    def on_events(self, events: Sequence[Event]) -> None:
        """What the computing thread delivered, on the loop's thread. Events of requests that have ended here already are dropped."""
        for event in events:
            stream = self.streams.get(event.request_id)
            if stream is None or stream.request is None:
                continue
            match event:
                case Admitted(at=at):
                    self._started(stream, stream.request, at)
                case Progressed():
                    self._progressed(stream, stream.request, event)
                case Yielded():
                    self._yielded(stream)
                case Embedded():
                    self._embedded(stream, stream.request, event)
                case Broken(error=error):
                    self._fail(stream, error)

    def _started(self, stream: Stream, request: GenerationRequest | EmbedRequest, at: float) -> None:
        stream.admitted = at
        stream.timeline.add(Phase.QUEUE, stream.received, at)
        ids = request.prompt_token_ids if isinstance(request, GenerationRequest) else None
        self._send(
            stream,
            InferStarted(
                seq=stream.seq,
                prompt_tokens=request.prompt_tokens,
                phases=stream.timeline.spans(),
                ignored=request.ignored,
                prompt_token_ids=ids,
                fixed=fixed_of(request),
                seed=request.params.seed if isinstance(request, GenerationRequest) else None,
            ),
        )

    def _progressed(self, stream: Stream, request: GenerationRequest | EmbedRequest, event: Progressed) -> None:
        stream.progressed(event)
        self._generated += event.tokens
        phases: tuple[PhaseSpan, ...] = ()
        if not stream.first_token_told:
            stream.first_token_told = True
            started = stream.received if stream.admitted is None else stream.admitted
            stream.timeline.add(Phase.PREFILL, started, event.at, prompt_tokens=request.prompt_tokens)
            phases = tuple(s for s in stream.timeline.spans() if s.phase is Phase.PREFILL)
        if event.deltas:
            self._send(stream, InferChunk(seq=stream.seq, choices=event.deltas, phases=phases))
        if event.done and self.streams.get(stream.request_id) is stream:
            usage = Usage(prompt_tokens=request.prompt_tokens, completion_tokens=stream.generated_tokens)
            self._send(stream, InferFinished(seq=stream.seq, usage=usage))
            self._finish(stream)

    def _embedded(self, stream: Stream, request: GenerationRequest | EmbedRequest, event: Embedded) -> None:
        vectors = tuple(base64.b64encode(v).decode() for v in event.vectors)
        usage = Usage(prompt_tokens=request.prompt_tokens)
        self._send(stream, EmbeddingsFinished(seq=stream.seq, dimensions=event.dimensions, vectors=vectors, usage=usage))
        if self.streams.get(stream.request_id) is stream:
            self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        record_phases(stream.timeline.spans(), context_of(stream.parent))
        self._completed += 1
        self._end(stream)

    def _fail(self, stream: Stream, error: ThawError, *, lost: bool = False) -> None:
        self._publish(stream.reply, InferFailed(seq=stream.seq, error=error.body(), engine_lost=lost))
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.fetching is not None:
            stream.fetching.cancel()
        if stream.holds_adapter and stream.adapter is not None and self.adapters is not None:
            stream.holds_adapter, stream.request = False, None
            self.adapters.release(stream.adapter.info.revision)
        self.streams.pop(stream.request_id, None)
        if not self.streams:
            self._idle_since = time.monotonic()
            self._changed()
        self._note_drained()

    def _send(self, stream: Stream, message: Reply) -> None:
        body = message.model_dump_json(exclude_defaults=False).encode()
        if len(body) > self._mesh.max_body:
            if self.batcher is not None:
                self.batcher.cancel(stream.request_id)
            self._fail(stream, PayloadTooLarge(f"the answer has {len(body)} bytes and a message at most {self._mesh.max_body}"))
            return
        stream.seq += 1
        self._outbox.put_nowait((stream.reply, body))

    def _publish(self, reply: str, message: Reply) -> None:
        self._outbox.put_nowait((reply, message.model_dump_json().encode()))

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

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
