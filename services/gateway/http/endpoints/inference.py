"""POST /v1/chat/completions, /v1/completions, /v1/embeddings, and whatever else an engine declares."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import replace

from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.adapters.engine_client import ENVELOPE_BYTES
from services.gateway.adapters.idempotency_store import Claim, Entry, Found, digest
from services.gateway.authorization import Keys
from services.gateway.domain.admission import Reservation
from services.gateway.http.error_formats import dialect_of
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.idempotency_key import key_of, repeatable
from services.gateway.http.parsing.multipart import is_form
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import Parsed, check
from services.gateway.http.responses.buffered import Collected, Embedded, NoTokens, Whole
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.http.responses.response_writer import Answer
from services.gateway.http.responses.wait_comments import progress_of
from services.gateway.idempotency.idempotent_request import joinable
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import Exchange
from services.gateway.telemetry.request_log import Origin
from shared.contracts.inference import FORWARDED, Endpoint
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest, prompts_of
from shared.errors import InvalidRequest, NotFound
from shared.telemetry.tracing import context_of, tracer

log = logging.getLogger(__name__)
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-", "other": ""}
_SPAN = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "other": "other"}


def client_of(scope: Scope) -> str:
    """Whose share of the gateway's memory a request takes: its key's, or, without one, its address's."""
    key = Keys.of(Headers(scope=scope))
    client = scope.get("client")
    return key or (f"address {client[0]}" if client else "")


class Generate:
    """The ASGI endpoint of one kind of request."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, parsers: ParserProcess) -> None:
        self._gateway = gateway
        self._parsers = parsers
        self._endpoint: Endpoint = endpoint

    def body_limit(self, scope: Scope) -> int:
        """What goes into one message besides its envelope; bytes that are no JSON take a third more there than here."""
        carried = self._gateway.mesh.max_body - ENVELOPE_BYTES
        if self._endpoint == "other":
            headers = Headers(scope=scope)
            carried -= 6 * (len(scope["query_string"]) + sum(len(headers.get(name, "")) for name in FORWARDED))
            if is_form(headers.get("content-type", "")):
                carried = carried * 3 // 4
        settings = self._gateway.settings
        together = min(settings.max_open_bytes, settings.max_open_bytes_per_key, settings.max_open_bytes_per_model)
        return max(0, min(settings.max_body_bytes, together, carried))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, gateway = time.monotonic(), self._gateway
        with gateway.admission.begin(client_of(scope)) as held:
            body = await read_body(scope, receive, self.body_limit(scope), held, gateway.settings.body_timeout)
            parsed = await self._parse(scope, body)
            await self._generate(parsed, held, arrived, scope, receive, send)

    async def _generate(
        self, parsed: Parsed, held: Reservation, arrived: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        card = self._gateway.catalog.resolve(parsed.request.model)
        held.name_model(card.name)
        if (adapter := self._gateway.catalog.adapter(parsed.request.model)) is not None:
            parsed = replace(parsed, ask=replace(parsed.ask, adapter=adapter))
        check(parsed, card)
        if not isinstance(parsed.request, OtherRequest):
            self._gateway.bounds.check(parsed.request)
            await self._gateway.lengths.check(parsed.request, card)
        answer_id, created = _PREFIX[self._endpoint] + uuid.uuid4().hex, int(time.time())
        key: tuple[Claim | Found, Entry] | None = None
        if (name := key_of(scope)) is not None:
            fresh = Entry(
                request=digest(parsed.ask.body, *filter(None, [scope["query_string"]])), answer_id=answer_id, created=created
            )
            place = joinable(await self._gateway.idempotency.find(name, fresh), fresh.request)
            key, answer_id, created = (place, fresh), place.entry.answer_id, place.entry.created
            parsed = repeatable(parsed, name)
        sink = self._sink(parsed, answer_id, created, keyed=key is not None)
        await self._answer(parsed, card, arrived, sink, key, scope, receive, send)

    async def _parse(self, scope: Scope, body: bytes) -> Parsed:
        headers = Headers(scope=scope)
        route = scope["path"]
        names = {name: headers[name] for name in (*FORWARDED, "content-type") if name in headers}
        try:
            return await self._parsers.parse(self._endpoint, body, route, scope["query_string"].decode("latin-1"), names)
        except InvalidRequest:
            # A route that no engine serves is a better answer than what is wrong with the body.
            if self._endpoint != "other" or any(route in card.routes for card in self._gateway.catalog.cards()):
                raise
            raise NotFound(f"Invalid URL ({scope['method']} {route})") from None

    async def _answer(
        self,
        parsed: Parsed,
        card: ModelCard,
        arrived: float,
        sink: EventStream | Whole,
        key: tuple[Claim | Found, Entry] | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        gateway = self._gateway
        span = tracer.start_span(
            f"{_SPAN[self._endpoint]} {card.name}",
            context=context_of(Headers(scope=scope).get("traceparent")),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": _SPAN[self._endpoint], "gen_ai.provider.name": "thaw"},
        )
        if gateway.settings.log_prompts:
            body = parsed.ask.body.decode(errors="replace") if parsed.ask.is_json else parsed.ask.content_type
            log.info("a request", extra={"model": card.name, "body": body})
            span.set_attribute("thaw.request.body", body)
        origin = Origin(scope["thaw.request_id"], span, arrived, client_request_id=scope.get("thaw.client_request_id"))
        exchange = gateway.open(parsed.ask, card, sink, origin, key)
        try:
            dialect = dialect_of(scope["path"])
            answer = Answer(exchange, sink, gateway.settings, self._progress, dialect, events=parsed.stream)
            await answer.write(scope, receive, send)
        finally:
            gateway.close(exchange, origin)

    def _progress(self, exchange: Exchange) -> str:
        return progress_of(exchange, self._gateway.dispatcher)

    def _sink(self, parsed: Parsed, answer_id: str, created: int, keyed: bool) -> EventStream | Whole:
        request = parsed.request
        if isinstance(request, OtherRequest):
            return NoTokens()
        if isinstance(request, EmbeddingRequest):
            return Embedded(request.model, request.encoding_format == "float")
        kind = "chat.completion" if isinstance(request, ChatCompletionRequest) else "text_completion"
        if parsed.stream:
            chunk = "chat.completion.chunk" if isinstance(request, ChatCompletionRequest) else kind
            include_usage = request.stream_options is not None and request.stream_options.include_usage
            logprobs = request.logprobs is not None and request.logprobs is not False
            return EventStream(
                Head(answer_id, chunk, created, request.model),
                include_usage=include_usage,
                token_ids=request.return_token_ids,
                logprobs=logprobs,
                repeats=keyed,
            )
        prompts = len(prompts_of(request.prompt)) if isinstance(request, CompletionRequest) else 1
        return Collected(Head(answer_id, kind, created, request.model), prompts * (request.n or 1), request.return_token_ids)
