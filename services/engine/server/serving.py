"""The token path: requests from NATS to the computing thread, and what comes of them back, numbered without gaps."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pydantic import BaseModel

from services.engine.generation.batcher import Batcher
from services.engine.generation.events import Admitted, Broken, Embedded, Event, Progressed, Yielded
from services.engine.generation.request import EmbedRequest, GenerationRequest
from services.engine.lora.cache import Adapters
from services.engine.server.request_reader import RequestReader
from services.engine.server.streams import Stream, fixed_of
from shared.contracts.engine import EngineLoad
from shared.contracts.inference import (
    EmbeddingsFinished,
    InferChunk,
    InferFinished,
    InferRequest,
    InferStarted,
    InferYielded,
    Usage,
)
from shared.contracts.models import ModelCard
from shared.contracts.phases import Phase, PhaseSpan
from shared.engines.request_server import Answering
from shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    InstanceDraining,
    InvalidRequest,
    PayloadTooLarge,
    ThawError,
)
from shared.messaging import Mesh
from shared.telemetry.timeline import Timeline
from shared.telemetry.tracing import context_of, record_phases

log = logging.getLogger(__name__)
_INLINE_BYTES = 16 * 1024
"""Bodies over this are tokenised in a thread, so that the loop goes on."""


class Serving(Answering[Stream]):
    """`batcher` is set once the model is loaded; until then requests are refused as not ready."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.reader: RequestReader | None = None
        self.batcher: Batcher | None = None
        self.adapters: Adapters | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._block_bytes = 0
        self._held = False

    def open(self, reader: RequestReader, batcher: Batcher, block_bytes: int, adapters: Adapters | None = None) -> None:
        """`adapters` None: this model takes none."""
        self.reader, self.batcher, self._block_bytes, self.adapters = reader, batcher, block_bytes, adapters
        self._idle_since = time.monotonic()

    # State

    def load(self) -> EngineLoad:
        active = sum(s.admitted is not None for s in self.streams.values())
        return EngineLoad(
            active=active,
            waiting=len(self.streams) - active,
            completed=self._completed,
            generated_tokens=self._generated,
            kv_bytes_used=self.batcher.blocks_used * self._block_bytes if self.batcher is not None else 0,
            idle_ms=int(self.idle_s * 1000),
            adapters=self.adapters.loaded() if self.adapters is not None else (),
        )

    def hold(self) -> None:
        """Take no new request until `let_go`. Raises `InstanceBusy` if there are any."""
        self.refuse_if_busy()
        self._held = True

    def let_go(self) -> None:
        self._held = False

    def take_own(self, request: InferRequest, heard: Callable[[BaseModel], None]) -> None:
        """Serve a request of the engine's own, held or not: nothing of it leaves this process."""
        self._accept(request, Stream(request.request_id, "", None, Timeline("engine"), time.monotonic(), own=heard), 0)

    def yield_(self, stream: Stream) -> None:
        """Stop at the next token, to go on elsewhere; what has not been given to the computing thread stops at once."""
        if isinstance(stream.request, GenerationRequest) and stream.fetching is None and self.batcher is not None:
            self.batcher.yield_(stream.request_id)
        else:
            self._yielded(stream)

    def _yielded(self, stream: Stream) -> None:
        self._send(stream, InferYielded(seq=stream.seq))
        self._end(stream)

    # Requests in

    async def _take(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        if self._held:
            raise InstanceDraining
        stream = Stream(request.request_id, reply, parent, Timeline("engine"), time.monotonic(), adapter=request.adapter)
        self._accept(request, stream, size)

    def _accept(self, request: InferRequest, stream: Stream, size: int) -> None:
        if self.draining:
            raise InstanceDraining
        if self.reader is None or self.batcher is None:
            raise InstanceDraining("the instance is not ready yet")
        if request.adapter is not None and (self.adapters is None or request.endpoint == "embedding"):
            raise InvalidRequest(f"{request.adapter.name} is an adapter for generating; this cannot use it", param="model")
        self._begin(stream)
        loop = asyncio.get_running_loop()
        stream.deadline = loop.call_later(request.deadline_ms / 1000, self._expire, stream)
        if size > _INLINE_BYTES:  # not awaited: the subscription's callbacks run one after the other
            job = loop.run_in_executor(self._threads, self._read, self.reader, request)
            job.add_done_callback(lambda done: self._read_done(stream, done))
            return
        try:
            self._submit(stream, self._read(self.reader, request))
        except ThawError as e:
            self._fail(stream, e)

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
            self._fail(stream, e)
            return
        stream.fetching, stream.holds_adapter = None, True
        self.batcher.submit(replace(request, adapter=adapter, variant=card.info.revision))

    def _expire(self, stream: Stream) -> None:
        self._stop(stream)
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

    def _stop(self, stream: Stream) -> None:
        if self.batcher is not None:
            self.batcher.cancel(stream.request_id)

    def _release(self, stream: Stream) -> None:
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.fetching is not None:
            stream.fetching.cancel()
        if stream.holds_adapter and stream.adapter is not None and self.adapters is not None:
            stream.holds_adapter, stream.request = False, None
            self.adapters.release(stream.adapter.info.revision)

    def _send(self, stream: Stream, message: BaseModel) -> None:
        if stream.own is not None:
            stream.own(message)
        else:
            super()._send(stream, message)

    def _put(self, stream: Stream, body: bytes) -> None:
        if len(body) <= self._mesh.max_body:
            super()._put(stream, body)
            return
        self._stop(stream)
        self._fail(stream, PayloadTooLarge(f"the answer has {len(body)} bytes and a message at most {self._mesh.max_body}"))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
