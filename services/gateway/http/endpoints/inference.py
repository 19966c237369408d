"""The inference endpoints: chat, completions, embeddings, and engines' own routes."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, replace

from nats.errors import Error as NatsError
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.adapters.engine_client import ENVELOPE_BYTES
from services.gateway.adapters.idempotency_store import Claim, ClaimLost, Entry, ExistingKey, digest
from services.gateway.adapters.rate_limiter import Admitted, is_limited
from services.gateway.domain.admission import Reservation
from services.gateway.domain.held_request import check_held
from services.gateway.domain.limits.estimate import estimate_tokens, predict_cost
from services.gateway.http.endpoints.received import receive_request
from services.gateway.http.error_formats import error_format_of
from services.gateway.http.parsing.idempotency_key import idempotency_key_of, with_seed
from services.gateway.http.parsing.multipart import is_form
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import ParsedRequest, check_model
from services.gateway.http.responses.buffered import BufferedCompletion, BufferedEmbeddings, BufferedSink, PassthroughOnly
from services.gateway.http.responses.event_stream import EventStream
from services.gateway.http.responses.openai_objects import Head
from services.gateway.http.responses.response_writer import ResponseWriter
from services.gateway.http.responses.tool_deltas import tool_options_of
from services.gateway.http.responses.wait_comments import describe_wait
from services.gateway.http.scopes import caller_of
from services.gateway.idempotency.idempotent_request import require_same_request
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.telemetry.request_log import RequestOrigin
from shared.contracts.inference import FORWARDED, Endpoint
from shared.contracts.keys import MAX_PRIORITY
from shared.contracts.models import ModelCard
from shared.contracts.openai import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, OtherRequest, prompts_of
from shared.errors import AuthenticationFailed, InvalidRequest, NotFound
from shared.telemetry.tracing import context_of, tracer

log = logging.getLogger(__name__)
PRIORITY_HEADER = "X-Thaw-Priority"
_INTEGER = re.compile(r"[+-]?[0-9]{1,3}")
_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-", "embedding": "embd-", "other": ""}
_SPAN = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "other": "other"}


@dataclass(frozen=True, slots=True)
class _IdempotencyKey:
    """The request's key as the store has it, and the entry to create if it is deleted."""

    place: Claim | ExistingKey
    new_entry: Entry


def _asked_priority(scope: Scope) -> int | None:
    """Read the priority that a client asks for; None without the header."""
    given = Headers(scope=scope).get(PRIORITY_HEADER)
    if given is None:
        return None
    if not _INTEGER.fullmatch(given) or abs(int(given)) > MAX_PRIORITY:
        raise InvalidRequest(f"{PRIORITY_HEADER} must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return int(given)


class Inference:
    """The ASGI endpoint of one kind of request."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint, parsers: ParserProcess) -> None:
        self._gateway = gateway
        self._parsers = parsers
        self._endpoint: Endpoint = endpoint

    def body_limit(self, scope: Scope) -> int:
        """Compute the largest body whose message to the engine is within NATS's limit.

        Bytes that are not JSON are sent in base64, which takes a third more.
        """
        payload_bytes = self._gateway.mesh.max_body - ENVELOPE_BYTES
        if self._endpoint == "other":
            headers = Headers(scope=scope)
            payload_bytes -= 6 * (len(scope["query_string"]) + sum(len(headers.get(name, "")) for name in FORWARDED))
            if is_form(headers.get("content-type", "")):
                payload_bytes = payload_bytes * 3 // 4
        settings = self._gateway.settings
        admitted_bytes = min(settings.max_open_bytes, settings.max_open_bytes_per_key, settings.max_open_bytes_per_model)
        return max(0, min(settings.max_body_bytes, admitted_bytes, payload_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with receive_request(self._gateway, scope, receive, self.body_limit(scope), (self._endpoint,)) as received:
            parsed = received.with_held(await self._parse(scope, received.body.content))
            await self._gateway.readiness.await_model(parsed.request.model)
            await self.infer(parsed, received.reservation, received.arrived_at, scope, receive, send)

    async def _parse(self, scope: Scope, body: bytes) -> ParsedRequest:
        headers = Headers(scope=scope)
        route = scope["path"]
        names = {name: headers[name] for name in (*FORWARDED, "content-type") if name in headers}
        try:
            return await self._parsers.parse(self._endpoint, body, route, scope["query_string"].decode("latin-1"), names)
        except InvalidRequest:
            # If no model serves the route, the route is wrong, rather than the body.
            if self._endpoint != "other" or any(route in card.routes for card in self._gateway.catalog.cards()):
                raise
            raise NotFound(f"Invalid URL ({scope['method']} {route})") from None

    async def infer(
        self, parsed: ParsedRequest, reservation: Reservation, arrived_at: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a parsed request."""
        gateway = self._gateway
        priority = caller_of(scope).priority(_asked_priority(scope))
        card = gateway.catalog.resolve(parsed.request.model)
        adapter = gateway.catalog.lora_adapter(parsed.request.model)
        if not caller_of(scope).may_use(adapter or card):
            raise await gateway.readiness.hide_model(parsed.request.model)
        reservation.name_model(card.name)
        if adapter is not None:
            parsed = replace(parsed, engine_request=replace(parsed.engine_request, lora_adapter=adapter))
        if parsed.engine_request.held is not None:
            check_held(parsed.request, parsed.engine_request, card, self.body_limit(scope))
        check_model(parsed, card)
        if not isinstance(parsed.request, OtherRequest):
            await gateway.prompt_lengths.check(parsed.request, card)
        await self._serve_limited(parsed, card, priority, arrived_at, scope, receive, send)

    async def _serve_limited(
        self, parsed: ParsedRequest, card: ModelCard, priority: int, arrived_at: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count the request against the limits and budgets of its key, and serve it."""
        key, gateway = caller_of(scope).key, self._gateway
        has_budget, has_limits = key is not None and key.has_budget, is_limited(key)
        if key is None or not (has_budget or has_limits):
            await self._serve(parsed, card, priority, None, arrived_at, scope, receive, send)
            return
        tokens = estimate_tokens(parsed.request, len(parsed.engine_request.body))
        reserved, admitted = None, None
        if has_budget:
            await gateway.budgets.prepare(key)
            reserved = gateway.budgets.reserve(key, tokens, card.name)
        try:
            if has_limits:
                admitted = await gateway.rate_limits.admit(key, tokens)
            await self._serve(parsed, card, priority, admitted, arrived_at, scope, receive, send)
        except BaseException:
            if admitted is not None and not admitted.is_settled:
                admitted.settle(0)  # it did not get as far as its queue
            raise
        finally:
            if reserved is not None:
                gateway.budgets.release(reserved)

    async def _serve(
        self,
        parsed: ParsedRequest,
        card: ModelCard,
        priority: int,
        admitted: Admitted | None,
        arrived_at: float,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        response_id, created, key = _PREFIX[parsed.engine_request.endpoint] + uuid.uuid4().hex, int(time.time()), None
        if (name := idempotency_key_of(scope)) is not None:
            key = await self._find_key(name, parsed, scope, response_id, created)
            response_id, created = key.place.entry.answer_id, key.place.entry.created
            parsed = with_seed(parsed, name)
        sink = self._sink(parsed, response_id, created, is_repeatable=key is not None)
        await self._respond(parsed, card, priority, arrived_at, sink, key, admitted, scope, receive, send)

    async def _find_key(self, name: str, parsed: ParsedRequest, scope: Scope, response_id: str, created: int) -> _IdempotencyKey:
        request = digest(parsed.engine_request.identity, *filter(None, [scope["query_string"]]))
        new_entry = Entry(request=request, answer_id=response_id, created=created)
        place = await self._gateway.idempotency.claim_or_get(name, new_entry)
        await self._require_valid_caller(place, scope)
        return _IdempotencyKey(require_same_request(place, request), new_entry)

    async def _require_valid_caller(self, place: Claim | ExistingKey, scope: Scope) -> None:
        """Check that the API key was not revoked meanwhile; delete the claim if it was."""
        try:
            self._gateway.authorizer.require_valid(caller_of(scope))
        except AuthenticationFailed:
            if isinstance(place, Claim):
                try:
                    await place.delete()
                except (ClaimLost, NatsError, TimeoutError) as e:
                    log.info("failed to delete the claim of a revoked API key", extra={"error": repr(e)})
            raise

    async def _respond(
        self,
        parsed: ParsedRequest,
        card: ModelCard,
        priority: int,
        arrived_at: float,
        sink: EventStream | BufferedSink,
        key: _IdempotencyKey | None,
        admitted: Admitted | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        gateway, engine_request = self._gateway, parsed.engine_request
        gateway.authorizer.require_valid(caller_of(scope))  # nothing from here on to `open` waits
        operation = _SPAN[engine_request.endpoint]
        span = tracer.start_span(
            f"{operation} {card.name}",
            context=context_of(Headers(scope=scope).get("traceparent")),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "thaw"},
        )
        if gateway.settings.log_prompts:
            body = engine_request.body.decode(errors="replace") if engine_request.is_json else engine_request.content_type
            log.info("request received", extra={"model": card.name, "body": body})
            span.set_attribute("thaw.request.body", body)
        client_request_id = scope.get("thaw.client_request_id")
        origin = RequestOrigin(
            scope["thaw.request_id"],
            span,
            arrived_at,
            client_request_id=client_request_id,
            caller=caller_of(scope),
            cost=predict_cost(parsed.request, len(engine_request.body), card.spec.engine) / caller_of(scope).weight,
            priority=priority,
        )
        request = gateway.open(engine_request, card, sink, origin, (key.place, key.new_entry) if key is not None else None)
        if admitted is not None:
            request.headers = admitted.headers
        try:
            error_format = error_format_of(scope["path"])
            writer = ResponseWriter(
                request, sink, gateway.settings, self._describe_wait, error_format, accepts_events=parsed.accepts_comments
            )
            await writer.write(scope, receive, send)
        finally:
            gateway.close(request, origin)
            if admitted is not None:
                admitted.settle(request.used_tokens)

    def _describe_wait(self, request: ActiveRequest) -> str:
        return describe_wait(request, self._gateway.dispatcher)

    def _sink(self, parsed: ParsedRequest, response_id: str, created: int, *, is_repeatable: bool) -> EventStream | BufferedSink:
        request = parsed.request
        if isinstance(request, OtherRequest):
            return PassthroughOnly()
        if isinstance(request, EmbeddingRequest):
            return BufferedEmbeddings(request.model, request.encoding_format == "float")
        kind = "chat.completion" if isinstance(request, ChatCompletionRequest) else "text_completion"
        tools = tool_options_of(request) if isinstance(request, ChatCompletionRequest) else None
        if parsed.stream:
            chunk = "chat.completion.chunk" if isinstance(request, ChatCompletionRequest) else kind
            include_usage = request.stream_options is not None and request.stream_options.include_usage
            logprobs = request.logprobs is not None and request.logprobs is not False
            return EventStream(
                Head(response_id, chunk, created, request.model),
                include_usage=include_usage,
                token_ids=request.return_token_ids,
                logprobs=logprobs,
                is_repeatable=is_repeatable,
                tools=tools,
            )
        prompts = len(prompts_of(request.prompt)) if isinstance(request, CompletionRequest) else 1
        choices = prompts * (request.n or 1)
        return BufferedCompletion(Head(response_id, kind, created, request.model), choices, request.return_token_ids, tools)
