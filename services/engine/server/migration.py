"""Migration commands of an engine: list, read, prefill, yield."""

from __future__ import annotations

import logging
import math
import time

from services.engine.generation.prepared_prefixes import Outcome, PrepareOrder
from services.engine.generation.request import GenerationRequest
from services.engine.kv_transfer.destination import Received
from services.engine.kv_transfer.exchange import KvExchange, carry_out
from services.engine.server.serving import Serving
from services.engine.server.streams import Stream
from shared.contracts.migration import PrepareResume, RequestsListed, ResumePrepared, TokensRead
from shared.errors import Conflict, InstanceDraining, InvalidRequest, NotFound, ThawError

log = logging.getLogger(__name__)


class EngineMigration:
    """Runs on the event loop."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._exchange: KvExchange | None = None

    def open(self, exchange: KvExchange) -> None:
        """Send and receive keys and values from now on."""
        self._exchange = exchange

    def list(self) -> RequestsListed:
        return RequestsListed(requests=tuple(s.running() for s in self._serving.streams.values() if s.is_movable))

    def _stream(self, request_id: str) -> Stream:
        stream = self._serving.streams.get(request_id)
        if stream is None:
            raise NotFound(f"Request {request_id} is not running on this instance")
        return stream

    def read(self, request_id: str) -> TokensRead:
        """Raises `NotFound`."""
        stream = self._stream(request_id)
        return TokensRead(
            running=stream.running(), prompt_token_ids=stream.prompts(), choices=stream.choices(), adapter=stream.adapter
        )

    def yield_(self, request_id: str) -> None:
        """Stop a request, which another engine will resume.

        Raises:
            NotFound: The request is not running here.
            Conflict: The request cannot be resumed elsewhere.
        """
        stream = self._stream(request_id)
        if reason := stream.running().fixed:
            raise Conflict(reason)
        self._serving.yield_(stream, self._exchange.source.retain_s(request_id) if self._exchange is not None else 0.0)

    async def offer_kv(self, read: TokensRead) -> TokensRead:
        """Permit another engine to read the request's keys and values, if they can be sent."""
        stream = self._serving.streams.get(read.running.request_id)
        if self._exchange is None or stream is None or not isinstance(stream.request, GenerationRequest):
            return read
        variant = stream.adapter.info.revision if stream.adapter is not None else ""
        try:
            offer = await self._exchange.source.offer(stream.request_id, variant, stream.request.share.flow)
        except ThawError as e:
            log.debug("keys and values are not offered", extra={"request_id": stream.request_id, "reason": e.message})
            return read
        return read.model_copy(update={"kv": offer})

    async def prepare(self, order: PrepareResume) -> ResumePrepared:
        """Prefill the sequences of a request that will be resumed here.

        Keys and values that the source offers are received first, and the rest is computed.

        Raises:
            Conflict: The weights have another revision.
            InsufficientMemory: The sequences do not fit.
            InstanceDraining: The engine accepts no requests.
        """
        serving = self._serving
        if serving.reader is None or serving.batcher is None or serving.draining or serving.is_paused:
            raise InstanceDraining
        serving.reader.check_revision(order.revision)
        if not order.sequences or not all(order.sequences):
            raise InvalidRequest("There are no tokens to compute", param="sequences")
        serving.reader.check_sequences(order.sequences)
        begun, card, adapter = time.monotonic(), order.adapter, None
        if card is not None:
            if serving.adapters is None:
                raise InvalidRequest("This engine takes no LoRA adapters", param="adapter")
            adapter = await serving.adapters.acquire(card)
        within_s = order.within_ms / 1e3 if order.within_ms is not None else math.inf
        made = PrepareOrder(
            order.prepared,
            order.sequences,
            adapter,
            card.info.revision if card is not None else "",
            order.keep_ms / 1e3,
            order.deadline_ms / 1e3,
            _ignore,
            within_s,
            caused_by=order.caused_by,
        )
        received = Received()
        try:
            if self._exchange is not None and order.kv is not None:
                outcome, received = await self._exchange.prepare(serving.batcher, made, order.kv, range(len(order.sequences)))
            else:
                outcome = await carry_out(serving.batcher, made)
        finally:
            if card is not None and serving.adapters is not None:
                serving.adapters.release(card.info.revision)
        if isinstance(outcome, ThawError):
            raise outcome
        return ResumePrepared(
            tokens=outcome.tokens,
            took_ms=(time.monotonic() - begun) * 1e3,
            left=outcome.left,
            kv_tokens=outcome.received,
            kv_bytes=received.nbytes,
            kv_ms=received.took_ms,
            kv_reason=received.reason,
        )

    def forget(self, name: str) -> None:
        if self._exchange is not None:
            self._exchange.forget(name)
        if self._serving.batcher is not None:
            self._serving.batcher.discard_prepared(name)


def _ignore(outcome: Outcome) -> None:
    """`carry_out` waits for the outcome."""
