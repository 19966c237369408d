"""The request path of an engine.

Requests go from NATS to the computing thread, and numbered responses back.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from pydantic import BaseModel

from services.engine.domain.output_format import FIELDS, is_constrained
from services.engine.domain.standings import Standings
from services.engine.domain.tool_request import may_be_enforced
from services.engine.generation.batcher import Batcher
from services.engine.generation.events import Admitted, Broken, Embedded, Event, Progressed, Yielded
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.request import EmbedRequest, GenerationRequest
from services.engine.kv_transfer.exchange import KvExchange
from services.engine.server.bounded_reads import BoundedReads
from services.engine.server.request_reader import RequestReader
from services.engine.server.streams import Stream, not_resumable_reason
from shared.contracts.engine import BackgroundWork, EngineLoad
from shared.contracts.inference import (
    EmbeddingsFinished,
    EmbeddingsPart,
    InferChunk,
    InferFinished,
    InferRequest,
    InferStarted,
    InferYielded,
    Usage,
)
from shared.contracts.phases import Phase, PhaseSpan
from shared.engines.adapter_cache import AdapterCache
from shared.engines.background_seconds import OWN
from shared.engines.charge_page import ChargePage
from shared.engines.request_server import RequestServer
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
from weights.kv_lease import PAGE_BYTES

log = logging.getLogger(__name__)
_INLINE_BYTES = 16 * 1024
"""Larger bodies are tokenised in a thread, so that the event loop stays responsive."""
_PART_BYTES = 1 << 20
"""Maximum size of one `EmbeddingsPart`."""
_EMBEDDINGS_HEAD_BYTES = 1024
"""Space for the fields of a message other than its vectors."""
_WITH_FIRST_TOKEN = frozenset({Phase.FETCH, Phase.LOAD, Phase.PREFILL})
"""Phases of a request that are reported with its first token."""
_COMPILE_WITHIN_S = 5.0
"""Seconds that the grammar of a request may take to compile."""
_CANCELLED_KEPT = 1_000
_QUOTES_BYTES = 3
"""Bytes around each vector in JSON: two quotes and a comma."""


class Serving(RequestServer[Stream]):
    """Requests of one engine.

    Until `open` is called they are rejected as not ready, or kept, if `keep_requests` was called.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.reader: RequestReader | None = None
        self.batcher: Batcher | None = None
        self.adapters: AdapterCache[LoraAdapter] | None = None
        self.exchange: KvExchange | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._grammars = BoundedReads(_COMPILE_WITHIN_S)
        self._block_bytes = 0
        self.is_paused = False
        self._loaded_at = 0.0
        self._unmetered_s = 0.0
        """Device seconds of the engine's own requests, and of results after a cancellation."""
        self._page: ChargePage | None = None
        self._cancelled_s: dict[str, float] = {}
        """Device seconds of cancelled requests that were sent to their gateways."""
        self._standings: Standings | None = None
        self._kept: list[tuple[InferRequest, Stream, int]] | None = None
        """Requests for the engine that is about to open, with their sizes in bytes."""

    def keep_requests(self) -> None:
        """Keep the requests that arrive before `open`, instead of rejecting them."""
        if self.reader is None:
            self._kept = []

    def open(
        self,
        reader: RequestReader,
        batcher: Batcher,
        block_bytes: int,
        adapters: AdapterCache[LoraAdapter] | None = None,
        phases: Sequence[PhaseSpan] = (),
    ) -> None:
        """Accept requests, those that were kept first.

        Args:
            reader: Reads requests for the model.
            batcher: Computes them.
            block_bytes: Bytes of one block of the KV cache.
            adapters: None if the model takes no LoRA adapters.
            phases: Phases of the start, for which the kept requests have waited.
        """
        self.reader, self.batcher, self._block_bytes, self.adapters = reader, batcher, block_bytes, adapters
        if not self.streams:
            self._idle_since = time.monotonic()
        kept, self._kept = self._kept or [], None
        for request, stream, size in kept:
            if self.streams.get(stream.request_id) is stream:
                self._begin_kept(request, stream, size, phases)

    def _begin_kept(self, request: InferRequest, stream: Stream, size: int, phases: Sequence[PhaseSpan]) -> None:
        stream.timeline.absorb(phases)
        stream.received = time.monotonic()  # until now it has waited for the start, and not for its turn
        try:
            self._check_adapter(request)
            self._begin(request, stream, size)
        except ThawError as e:
            self._fail(stream, e)

    def keep_meters(self, page: ChargePage) -> None:
        """Write the seconds of the engine's own requests to a page."""
        self._page = page

    def follow_objective(self, percentile: float) -> None:
        """Order the model's steps by how far it is from complying with its objective."""
        self._standings = Standings(percentile)

    def weights_arrived(self, phases: Sequence[PhaseSpan]) -> None:
        """Add the phases of the load, which is over, to the requests that waited for it."""
        self._loaded_at = time.monotonic()
        for stream in self.streams.values():
            if not stream.first_token_sent:
                stream.timeline.absorb(phases)

    # State

    def load(self) -> EngineLoad:
        active = sum(s.admitted is not None for s in self.streams.values())
        return EngineLoad(
            active=active,
            waiting=len(self.streams) - active,
            completed=self._completed,
            generated_tokens=self._generated,
            kv_bytes_used=self.batcher.blocks_used * self._block_bytes if self.batcher is not None else 0,
            kv_bytes_wanted=self.batcher.pages_wanted * PAGE_BYTES if self.batcher is not None else 0,
            busy_s=round(self.batcher.meters.busy_s, 6) if self.batcher is not None else 0.0,
            background=self._list_background(),
            charged_s=round(self.batcher.meters.closed_s - self._unmetered_s, 6) if self.batcher is not None else None,
            idle_ms=int(self.idle_s * 1000),
            adapters=self.adapters.list_loaded() if self.adapters is not None else (),
        )

    def _list_background(self) -> tuple[BackgroundWork, ...]:
        seconds = dict(self.batcher.meters.background_s) if self.batcher is not None else {}
        if self._unmetered_s:
            seconds[OWN] = seconds.get(OWN, 0.0) + self._unmetered_s
        return tuple(BackgroundWork(plan_id=cause, seconds=round(s, 6)) for cause, s in seconds.items())

    def pause(self) -> None:
        """Reject new requests until `unpause`. Raises `InstanceBusy` if any are running."""
        self.raise_if_busy()
        self.is_paused = True

    def unpause(self) -> None:
        self.is_paused = False

    def serve_internal(self, request: InferRequest, on_response: Callable[[BaseModel], None]) -> None:
        """Serve a request of the engine itself, even while paused.

        Its responses do not leave the process.
        """
        self._accept(
            request, Stream(request.request_id, "", None, Timeline("engine"), time.monotonic(), internal_listener=on_response), 0
        )

    def yield_(self, stream: Stream, retain_s: float = 0.0) -> None:
        """Stop a request at the next token. Its keys and values can be read for `retain_s` seconds.

        A request that the computing thread has not seen stops at once.
        """
        if isinstance(stream.request, GenerationRequest) and stream.submitting is None and self.batcher is not None:
            self.batcher.yield_(stream.request_id, retain_s)
        else:
            self._send_yielded(stream)

    def _send_yielded(self, stream: Stream) -> None:
        self._send(stream, InferYielded(seq=stream.seq))
        self._remove(stream)

    # Requests in

    async def _handle_request(self, request: InferRequest, reply: str, parent: str | None, size: int) -> None:
        if self.is_paused:
            raise InstanceDraining
        stream = Stream(request.request_id, reply, parent, Timeline("engine"), time.monotonic(), adapter=request.adapter)
        self._accept(request, stream, size)

    def _accept(self, request: InferRequest, stream: Stream, size: int) -> None:
        if self.draining:
            raise InstanceDraining
        is_open = self.reader is not None and self.batcher is not None
        if not is_open and self._kept is None:
            raise InstanceDraining("The instance is not ready yet")
        if is_open:
            self._check_adapter(request)
        self._register(stream)
        stream.deadline = asyncio.get_running_loop().call_later(request.deadline_ms / 1000, self._expire, stream)
        if self._kept is not None:
            self._kept.append((request, stream, size))
        else:
            self._begin(request, stream, size)

    def _check_adapter(self, request: InferRequest) -> None:
        """Raise `InvalidRequest` if the request needs a LoRA adapter, and cannot have one."""
        if request.adapter is not None and (self.adapters is None or request.endpoint == "embedding"):
            raise InvalidRequest(
                f"{request.adapter.name} is a LoRA adapter for generation; this request cannot use it", param="model"
            )

    def _begin(self, request: InferRequest, stream: Stream, size: int) -> None:
        """Read a registered request, and submit it."""
        assert self.reader is not None
        assert self.batcher is not None
        if request.standing is not None and self._standings is not None:
            self.batcher.required_requests = self._standings.record(request.standing)
        if is_constrained(request.body) or may_be_enforced(request.body.get("tools"), request.body.get("tool_choice")):
            reading = self._compile(self.reader, stream, request)
            stream.reading = asyncio.create_task(reading, name=f"grammar of {request.request_id}")
            return
        if size > _INLINE_BYTES:  # not awaited: the subscription runs its callbacks one at a time
            job = asyncio.get_running_loop().run_in_executor(self._threads, self._read, self.reader, request)
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
        except Exception as e:  # a tokenizer or template may raise anything; the request must get a response
            log.exception("failed to read a request", extra={"request_id": request.request_id})
            raise EngineFailed(f"The request could not be read: {type(e).__name__}: {str(e)[:300]}") from e

    async def _compile(self, reader: RequestReader, stream: Stream, request: InferRequest) -> None:
        """Read a request that may have a grammar, and submit it."""
        try:
            read = await self._grammars.run(partial(self._read, reader, request), prepare=reader.prepare_grammars)
            stream.reading = None
            self._submit(stream, read)
        except TimeoutError:
            stream.reading = None
            param = min(FIELDS & request.body.keys(), default="tools")
            self._fail(stream, InvalidRequest(f"{param} takes too long to compile. Simplify it", param=param))
        except ThawError as e:
            stream.reading = None
            self._fail(stream, e)
        except Exception as e:  # a task boundary: the request must get a response
            log.exception("failed to compile a grammar", extra={"request_id": request.request_id})
            stream.reading = None
            self._fail(stream, EngineFailed(f"The request could not be read: {type(e).__name__}: {str(e)[:300]}"))

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
        needs_lora = stream.adapter is not None
        has_rest = isinstance(request, GenerationRequest) and self.exchange is not None and self.exchange.has_rest(request)
        if isinstance(request, GenerationRequest) and (needs_lora or has_rest):
            stream.submitting = asyncio.create_task(self._submit_later(stream, request), name=f"submit {stream.request_id}")
        else:
            self.batcher.submit(request)

    async def _submit_later(self, stream: Stream, request: GenerationRequest) -> None:
        """Submit the request once its LoRA adapter is loaded and its source has sent the rest."""
        assert self.batcher is not None
        if stream.adapter is not None:
            assert self.adapters is not None
            try:
                adapter = await self.adapters.acquire(stream.adapter)
            except Exception as e:  # a task boundary: the request must get a response
                if not isinstance(e, ThawError):
                    log.exception("failed to load an adapter", extra={"adapter": stream.adapter.name})
                    e = EngineFailed(f"The adapter {stream.adapter.name} could not be loaded: {type(e).__name__}: {str(e)[:300]}")
                stream.submitting = None
                self._fail(stream, e)
                return
            stream.has_lora = True
            request = replace(request, adapter=adapter, variant=stream.adapter.info.revision)
        if self.exchange is not None and self.exchange.has_rest(request):
            await self.exchange.receive_rest(self.batcher, request)
        stream.submitting = None
        self.batcher.submit(request)

    def _expire(self, stream: Stream) -> None:
        self._cancel_compute(stream)
        self._fail(stream, DeadlineExceeded("The response was not complete within the request's deadline"))

    # Responses out

    def on_events(self, events: Sequence[Event]) -> None:
        """Handle events of the computing thread on the event loop.

        Events of ended requests are dropped.
        """
        for event in events:
            stream = self.streams.get(event.request_id)
            if stream is None or stream.request is None:
                self._count_dropped(event)
                continue
            match event:
                case Admitted(at=at):
                    self._send_started(stream, stream.request, at)
                case Progressed():
                    self._send_progress(stream, stream.request, event)
                case Yielded():
                    self._send_yielded(stream)
                case Embedded():
                    self._send_embeddings(stream, stream.request, event)
                case Broken(error=error):
                    self._fail(stream, error)

    def _send_started(self, stream: Stream, request: GenerationRequest | EmbedRequest, at: float) -> None:
        stream.admitted = at
        stream.timeline.add(Phase.QUEUE, stream.received, at)
        is_generation = isinstance(request, GenerationRequest)
        ids = request.prompt_token_ids if isinstance(request, GenerationRequest) else None
        self._send(
            stream,
            InferStarted(
                seq=stream.seq,
                prompt_tokens=request.prompt_tokens,
                phases=tuple(s for s in stream.timeline.spans() if not is_generation or s.phase not in _WITH_FIRST_TOKEN),
                ignored=request.ignored,
                prompt_token_ids=ids,
                fixed=not_resumable_reason(request),
                seed=request.params.seed if isinstance(request, GenerationRequest) else None,
                tool_format=request.tool_format if isinstance(request, GenerationRequest) else None,
            ),
        )

    def _send_progress(self, stream: Stream, request: GenerationRequest | EmbedRequest, event: Progressed) -> None:
        stream.record_progress(event)
        self._count_seconds(stream, event.device_s)
        self._generated += event.tokens
        phases: tuple[PhaseSpan, ...] = ()
        if not stream.first_token_sent:
            stream.first_token_sent = True
            started = stream.received if stream.admitted is None else stream.admitted
            if started < self._loaded_at < event.at:  # it computed the first layers while the others arrived
                started = self._loaded_at
            stream.timeline.add(
                Phase.PREFILL, started, event.at, prompt_tokens=request.prompt_tokens, **self._describe_received(request)
            )
            phases = tuple(s for s in stream.timeline.spans() if s.phase in _WITH_FIRST_TOKEN)
        if event.deltas:
            self._send(stream, InferChunk(seq=stream.seq, choices=event.deltas, phases=phases, device_s=round(event.device_s, 6)))
        if event.done and self.streams.get(stream.request_id) is stream:
            usage = Usage(
                prompt_tokens=request.prompt_tokens,
                completion_tokens=stream.generated_tokens,
                device_s=round(event.device_s, 6),
            )
            self._send(stream, InferFinished(seq=stream.seq, usage=usage))
            self._finish(stream)

    def _count_seconds(self, stream: Stream, device_s: float) -> None:
        if stream.internal_listener is not None:
            self._add_unmetered(device_s - stream.device_s)
        stream.device_s = device_s

    def _count_dropped(self, event: Event) -> None:
        """Count the seconds of a result that arrives after its request was cancelled."""
        if isinstance(event, Progressed | Embedded) and event.request_id in self._cancelled_s:
            self._add_unmetered(event.device_s - self._cancelled_s[event.request_id])
            self._cancelled_s[event.request_id] = event.device_s

    def _add_unmetered(self, seconds: float) -> None:
        self._unmetered_s += seconds
        if self._page is not None:
            self._page.write_unmetered(self._unmetered_s)

    def _describe_received(self, request: GenerationRequest | EmbedRequest) -> dict[str, int]:
        """Describe what a resumed request did not compute, because its source sent it."""
        if self.exchange is None or not isinstance(request, GenerationRequest) or not request.prepared:
            return {}
        received = self.exchange.take_received(request.prepared)
        return {"kv_tokens": received.tokens, "kv_bytes": received.nbytes} if received.nbytes else {}

    def _send_embeddings(self, stream: Stream, request: GenerationRequest | EmbedRequest, event: Embedded) -> None:
        vectors = tuple(base64.b64encode(v).decode() for v in event.vectors)
        self._count_seconds(stream, event.device_s)
        usage = Usage(prompt_tokens=request.prompt_tokens, device_s=round(event.device_s, 6))
        first, vectors = split_vectors(vectors, self._mesh.max_body)
        for part in first:
            self._send(stream, EmbeddingsPart(seq=stream.seq, vectors=part))
        self._send(stream, EmbeddingsFinished(seq=stream.seq, dimensions=event.dimensions, vectors=vectors, usage=usage))
        if self.streams.get(stream.request_id) is stream:
            self._finish(stream)

    def _finish(self, stream: Stream) -> None:
        own = (s for s in stream.timeline.spans() if s.process == stream.timeline.process)
        record_phases(own, context_of(stream.parent))
        self._completed += 1
        self._remove(stream)

    def _end_drain(self) -> None:
        """End now, or when the engine that resumes the last request has read what it needs."""
        # The timer that this sets keeps the event, and not the engine with its weights.
        if self.exchange is None or not self.exchange.source.call_when_unread(self.drained.set):
            super()._end_drain()

    def _cancel_compute(self, stream: Stream) -> None:
        if self.batcher is not None:
            self.batcher.cancel(stream.request_id)
            self._cancelled_s[stream.request_id] = stream.device_s
            if len(self._cancelled_s) > _CANCELLED_KEPT:
                del self._cancelled_s[next(iter(self._cancelled_s))]

    def _release(self, stream: Stream) -> None:
        if stream.deadline is not None:
            stream.deadline.cancel()
        if stream.reading is not None:
            stream.reading.cancel()
        if stream.submitting is not None:
            stream.submitting.cancel()
        if stream.has_lora and stream.adapter is not None and self.adapters is not None:
            stream.has_lora, stream.request = False, None
            self.adapters.release(stream.adapter.info.revision)

    def _send(self, stream: Stream, message: BaseModel) -> None:
        if stream.internal_listener is not None:
            stream.internal_listener(message)
        else:
            super()._send(stream, message)

    def _enqueue(self, stream: Stream, body: bytes) -> None:
        if len(body) <= self._mesh.max_body:
            super()._enqueue(stream, body)
            return
        self._cancel_compute(stream)
        self._fail(
            stream, PayloadTooLarge(f"The response has {len(body)} bytes, and a message holds at most {self._mesh.max_body}")
        )

    def close(self) -> None:
        self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def split_vectors(vectors: tuple[str, ...], max_body: int) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Divide the vectors of one answer among messages.

    Args:
        vectors: Base64, all of one length.
        max_body: Bytes that one message may have.

    Returns:
        The vectors of each `EmbeddingsPart`, and those of the last message; no parts where one
        message holds all.
    """
    size = len(vectors[0]) + _QUOTES_BYTES if vectors else 1
    if len(vectors) * size + _EMBEDDINGS_HEAD_BYTES <= max_body:
        return [], vectors
    count = max(1, (min(max_body, _PART_BYTES) - _EMBEDDINGS_HEAD_BYTES) // size)
    parts = [vectors[i : i + count] for i in range(0, len(vectors), count)]
    return parts[:-1], parts[-1]
