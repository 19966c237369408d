"""POST /v1/rerank and /v1/score, for embedding models whose engine does not serve them."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from services.gateway.domain.admission import Reservation
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.held_request import too_large
from services.gateway.domain.request_limits import RequestLimits
from services.gateway.http.endpoints.inference import Inference
from services.gateway.http.parsing.parser_process import ParserProcess
from services.gateway.http.parsing.request_parser import ParsedRequest
from services.gateway.http.responses.translated_send import TranslatedSend
from services.gateway.http.scopes import caller_of
from services.gateway.http.translation.scoring import read_scoring
from services.gateway.loop import Gateway
from shared.errors import PayloadTooLarge


class ScoringInference(Inference):
    """Pass the request on if the model's engine serves the route; otherwise embed its texts."""

    def __init__(self, gateway: Gateway, parsers: ParserProcess) -> None:
        super().__init__(gateway, "other", parsers)
        self._limits = RequestLimits(prompts=gateway.settings.max_prompts)

    async def infer(
        self, parsed: ParsedRequest, reservation: Reservation, arrived_at: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a parsed request."""
        if self._embeds(parsed, scope):
            parsed, send = self._translate(parsed, scope, send)
        await super().infer(parsed, reservation, arrived_at, scope, receive, send)

    def _embeds(self, parsed: ParsedRequest, scope: Scope) -> bool:
        """True if the gateway scores the texts itself, by the embeddings of the model."""
        card = self._gateway.catalog.resolve(parsed.request.model)
        is_ours = parsed.engine_request.is_json and scope["path"] not in card.routes and card.info.task == "embed"
        return is_ours and caller_of(scope).may_use(card)

    def _translate(self, parsed: ParsedRequest, scope: Scope, send: Send) -> tuple[ParsedRequest, Send]:
        limit = self.body_limit(scope)
        if parsed.engine_request.held is not None:
            raise too_large(limit)
        fields = {"model": parsed.request.model} | (parsed.request.model_extra or {})
        scoring = read_scoring(scope["path"], fields, parsed.engine_request.body)
        request, body = scoring.embedding_request()
        self._limits.check(request)
        if len(body) > limit:
            raise PayloadTooLarge(f"The texts have {len(body)} bytes, and the limit is {limit}. Send fewer")
        return ParsedRequest(request, EngineRequest("embedding", body)), TranslatedSend(send, scoring)
