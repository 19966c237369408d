"""POST /v1/chat/completions, /v1/completions, /v1/embeddings."""

from __future__ import annotations

import time
import uuid

from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.adapters.engines import ENVELOPE_BYTES
from services.gateway.exchange import Exchange
from services.gateway.http.answers import StreamedAnswer, answer_whole
from services.gateway.http.collect import Collected, Embedded
from services.gateway.http.edge import read_body
from services.gateway.http.once import HEADER, Once
from services.gateway.http.parse import Parsed, check, parse
from services.gateway.http.shapes import Head
from services.gateway.http.sse import EventStream
from services.gateway.http.waking import progress_of
from services.gateway.service import Gateway, Origin
from shared.contracts.inference import Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, prompts_of
from shared.telemetry.tracing import context_of, tracer

_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-"}
_SPAN = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}


class Generate:
    """The ASGI endpoint of one kind of request."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint) -> None:
        self._gateway = gateway
        self._once = Once(gateway.idempotency, gateway.settings)
        self._endpoint: Endpoint = endpoint

    @property
    def body_limit(self) -> int:
        return min(self._gateway.settings.max_body_bytes, self._gateway.mesh.max_body - ENVELOPE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.monotonic()
        parsed = parse(self._endpoint, await read_body(scope, receive, self.body_limit))
        card = self._gateway.catalog.resolve(parsed.request.model)
        check(parsed, card)
        await self._gateway.lengths.check(parsed.request, card)
        if HEADER not in Headers(scope=scope):
            await self._answer(parsed, card, arrived, scope, receive, send)
            return

        async def produce(tee: Send) -> bool:
            return await self._answer(parsed, card, arrived, scope, receive, tee, keyed=True)

        await self._once.answer(parsed.body, parsed.stream, scope, receive, send, produce)

    async def _answer(
        self, parsed: Parsed, card: ModelCard, arrived: float, scope: Scope, receive: Receive, send: Send, *, keyed: bool = False
    ) -> bool:
        """Whether the answer was whole and good."""
        gateway = self._gateway
        span = tracer.start_span(
            f"{_SPAN[self._endpoint]} {card.name}",
            context=context_of(Headers(scope=scope).get("traceparent")),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": _SPAN[self._endpoint], "gen_ai.provider.name": "thaw"},
        )
        origin = Origin(scope["thaw.request_id"], span, arrived)
        sink = self._sink(parsed)
        exchange = gateway.open(parsed, card, sink, origin)
        try:
            if isinstance(sink, EventStream):
                await StreamedAnswer(exchange, sink, gateway.settings, self._progress).write(receive, send, keyed=keyed)
            else:
                await answer_whole(exchange, sink, scope, receive, send, keyed=keyed)
        finally:
            gateway.close(exchange, origin)
        return exchange.error is None and not exchange.gone

    def _progress(self, exchange: Exchange) -> str:
        return progress_of(exchange, self._gateway.dispatcher)

    def _sink(self, parsed: Parsed) -> EventStream | Collected | Embedded:
        request = parsed.request
        if isinstance(request, EmbeddingRequest):
            return Embedded(request.model, request.encoding_format == "float")
        kind = "chat.completion" if isinstance(request, ChatCompletionRequest) else "text_completion"
        if parsed.stream:
            chunk = "chat.completion.chunk" if isinstance(request, ChatCompletionRequest) else kind
            include_usage = request.stream_options is not None and request.stream_options.include_usage
            logprobs = request.logprobs is not None and request.logprobs is not False
            return EventStream(
                self._head(chunk, request.model), include_usage=include_usage, token_ids=request.return_token_ids, logprobs=logprobs
            )
        prompts = len(prompts_of(request.prompt)) if isinstance(request, CompletionRequest) else 1
        return Collected(self._head(kind, request.model), prompts * (request.n or 1), request.return_token_ids)

    def _head(self, kind: str, model: str) -> Head:
        return Head(_PREFIX[self._endpoint] + uuid.uuid4().hex, kind, int(time.time()), model)
