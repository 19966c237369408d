"""Anthropic's token counting, for engines that do not serve it themselves.

The gateway counts with the model's own tokenizer and chat template, so no instance is started.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.adapters.rate_limiter import is_limited
from services.gateway.domain.held_request import check_held
from services.gateway.http.endpoints.inference import Inference
from services.gateway.http.endpoints.received import receive_request
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import check_model
from services.gateway.http.scopes import caller_of
from services.gateway.loop import Gateway
from shared.contracts.inference import FORWARDED
from shared.contracts.openai import ChatCompletionRequest

ROUTE = "/v1/messages/count_tokens"
_NO_HISTORY = b"[]"


class CountTokens:
    """`POST /v1/messages/count_tokens`."""

    def __init__(self, gateway: Gateway, parsers: ParserProcess) -> None:
        self._gateway = gateway
        self._parsers = parsers
        self._passthrough = Inference(gateway, "other", parsers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, headers = self._gateway, Headers(scope=scope)
        names = {name: headers[name] for name in (*FORWARDED, "content-type") if name in headers}
        query, limit = scope["query_string"].decode("latin-1"), self._passthrough.body_limit(scope)
        async with receive_request(gateway, scope, receive, limit, ("other",)) as received:
            body = received.body.content
            given = received.with_held(await self._parsers.parse("other", body, ROUTE, query, names))
            await gateway.readiness.await_model(given.request.model)
            card = gateway.catalog.resolve(given.request.model)
            if not given.engine_request.is_json or ROUTE in card.routes:
                await self._passthrough.infer(given, received.reservation, received.arrived_at, scope, receive, send)
                return
            if not caller_of(scope).may_use(gateway.catalog.lora_adapter(given.request.model) or card):
                raise await gateway.readiness.hide_model(given.request.model)
            parsed = received.with_held(await self._parsers.parse("other", body, ROUTE, query, names, _NO_HISTORY))
            assert isinstance(parsed.request, ChatCompletionRequest)
            check_held(parsed.request, parsed.engine_request, card, limit)
            check_model(parsed, card)
            limited = await self._count_request(scope)
            tokens = await gateway.prompt_lengths.count(parsed.request, card)
        await json_response({"input_tokens": tokens}, headers=limited)(scope, receive, send)

    async def _count_request(self, scope: Scope) -> dict[str, str]:
        """Count the request, but no tokens, against the limits of its key.

        Returns:
            Headers with the limits.
        """
        key = caller_of(scope).key
        if key is None or not is_limited(key):
            return {}
        admitted = await self._gateway.rate_limits.admit(key, 0)
        admitted.settle(0)
        return admitted.headers
