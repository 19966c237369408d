"""One request, from its validation to its log entry."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.followed_usage import FollowedResponse
from services.gateway.domain.route_table import Route
from services.gateway.domain.ticket import Ticket
from services.gateway.requests.client_response import ClientResponse
from services.gateway.requests.completion import Completion
from services.gateway.requests.handoff import Handoffs
from services.gateway.requests.infer_message import InferMessage, encode_infer
from services.gateway.requests.response_reader import Attempt, ResponseReader
from services.gateway.requests.resume_state import ResumeState
from services.gateway.requests.sink import TokenSink
from services.gateway.requests.stats import RequestStats
from shared.contracts.models import ModelCard
from shared.contracts.objectives import ObjectiveStanding
from shared.errors import NotFound, ThawError, Unavailable, Unreachable


class IdempotencyGuard(Protocol):
    """The idempotency key of a request, as the request and the gateway's loop use it.

    Attributes:
        metered_as: Id of the response whose usage this gateway reports; None: another one does.
    """

    @property
    def metered_as(self) -> str | None: ...

    @property
    def followed(self) -> FollowedResponse | None:
        """The response of another gateway that was read to its end, and may not be recorded yet."""

    def send(self, route: Route) -> None:
        """Record the chosen instance under the key, then send the request to it."""

    def catch_up(self) -> None:
        """Read the engine's messages from the stored stream; live ones may have been missed."""

    def recover_gap(self) -> bool:
        """Read missing messages from the stored stream; False if they are not expected there."""

    def release_key(self, error: ThawError) -> None:
        """Give the key up for another gateway, and fail the request here with `error`."""

    async def client_left(self) -> None:
        """End the request, unless other clients wait for its response."""

    async def wait_until_settled(self) -> None:
        """Wait until the key records how the request ended."""


class ActiveRequest:
    """The parts of one request, and the steps that involve several of them.

    Only the gateway's event loop uses it. Each part owns its state:

    Attributes:
        ticket: The dispatcher's state of the request.
        reader: The present attempt, and the engine's messages.
        response: The response to the client.
        resume_state: The state with which another engine continues the response.
        handoffs: Hand-offs to other instances.
        stats: Timings and token counts.
        completion: The end of the request.
        idempotency: The request's Idempotency-Key; None without one.
        on_requeued: Called when the request waits for another instance.
        meter: Records what the request used. Called when it ends, before its client has the end of
            the response, and again if it counts here only later.
        key_digest: Hash of the client's API key; empty without a key.
        headers: Headers of the response that do not depend on it.
        received_at: Unix time of its arrival, for people.
        standing: Returns how many requests of the model met its objective.
    """

    def __init__(
        self,
        ticket: Ticket,
        card: ModelCard,
        engine_request: EngineRequest,
        sink: TokenSink,
        dispatcher: Dispatcher,
        buffer_limit_bytes: int,
    ) -> None:
        self.ticket = ticket
        self.card = card
        self.engine_request = engine_request
        self.response = ClientResponse(sink, buffer_limit_bytes)
        self.resume_state = ResumeState()
        self.handoffs = Handoffs()
        self.stats = RequestStats()
        self.completion = Completion(self._on_done)
        self.reader = ResponseReader(
            ticket,
            card.name,
            dispatcher,
            self.response,
            self.resume_state,
            self.handoffs,
            self.stats,
            self.completion,
        )
        self.idempotency: IdempotencyGuard | None = None
        self.on_requeued: Callable[[], None] | None = None
        self.meter: Callable[[], None] = _no_meter
        self.key_digest = ""
        self.headers: dict[str, str] = {}
        self.received_at = 0.0
        self.standing: Callable[[], ObjectiveStanding | None] = _no_standing
        self._dispatcher = dispatcher

    def attach_idempotency(self, guard: IdempotencyGuard) -> None:
        """Put the request under an idempotency key, whose replies are captured."""
        self.idempotency = guard
        self.reader.accepts_duplicates = True
        self.reader.recover_gap = guard.recover_gap

    # Attempts on engines.

    @property
    def attempt(self) -> Attempt:
        return self.reader.attempt

    @property
    def can_resume(self) -> bool:
        """True if the next attempt continues the response instead of starting it again."""
        return self._resume_fields() is not None

    def begin_attempt(self, route: Route, now: float) -> None:
        """Expect the response from the instance of `route`, which the ticket names."""
        ordered = self.handoffs.ordered_to(self.ticket.instance_id)
        if ordered is None:
            self.handoffs.abandon(Unavailable("The request was sent to another instance than the destination of the hand-off"))
        fields = self._resume_fields(ordered.prepared if ordered is not None else "")
        tokens = self.resume_state.tokens if fields is not None else None
        self.handoffs.attempt_started(self.ticket, ordered, tokens, self.stats.last_token_at, now)
        if fields is None:
            self.restart()
            self.stats.response_requested(route, self.ticket.arrived_at, now)
        else:
            self._resume(fields)
        self.attempt.id, self.attempt.revision = self.ticket.attempt_id, route.status.revision

    def infer_message(self) -> InferMessage:
        """Encode the message that starts the present attempt."""
        return encode_infer(self.ticket, self.engine_request, self.attempt.resume, self.standing())

    def restart(self) -> None:
        """Expect a response from its beginning."""
        self.reader.restart()
        self.resume_state.restart()
        self.ticket.is_resumable = False
        self.stats.restart(keep_first_token=self.response.has_started)
        self.response.restart()

    def resume_after(self, unconfirmed: list[dict[str, Any]]) -> None:
        """Expect the rest of the response from another engine.

        Args:
            unconfirmed: Messages read here that the next engine generates again.
        """
        self.resume_state.rewind(unconfirmed)
        self._resume(self._resume_fields())

    def _resume(self, fields: dict[str, Any] | None) -> None:
        self.resume_state.attempt_started()
        self.reader.resume(fields)
        self.response.resume()

    def _resume_fields(self, prepared: str = "") -> dict[str, Any] | None:
        if not self.ticket.is_resumable:
            return None
        return self.resume_state.resume_fields(prepared, keeps_partial_output=self.response.keeps_partial_output)

    # Events from the engine client and the dispatcher.

    def on_message(self, data: bytes) -> None:
        self.reader.on_message(data)

    def on_no_responders(self) -> None:
        error = Unreachable(f"No engine listens for instance {self.ticket.instance_id}")
        self.reader.on_refused(error, time.monotonic())

    def on_unsendable(self, error: ThawError) -> None:
        self.reader.abort(error)

    def handle_requeue(self) -> None:
        """The request lost its instance and waits for another one."""
        self.handoffs.abandon(Unavailable("The destination of the hand-off did not answer"))
        if self.on_requeued is not None:
            self.on_requeued()

    # The client.

    async def client_left(self) -> None:
        """End the request of a client that disconnected, unless its key keeps it alive."""
        if self.idempotency is not None:
            await self.idempotency.client_left()
        else:
            self.cancel()

    async def wait_until_settled(self) -> None:
        """Wait until the client may repeat the failed request."""
        if self.idempotency is not None:
            await self.idempotency.wait_until_settled()

    @property
    def used_tokens(self) -> int | None:
        """Prompt and completion tokens that engines computed for it; None if none has begun."""
        if self.response.is_replay:
            return 0
        usage, generated = self.stats.usage, self.resume_state.tokens
        if not usage.prompt_tokens:
            return None if self.ticket.attempts else 0
        return usage.prompt_tokens + max(usage.completion_tokens, generated)

    def cancel(self) -> None:
        """End the request without a response: leave the queue, or stop the engine."""
        if not self.completion.is_done:
            self.completion.has_client_left = True
            now = time.monotonic()
            self._dispatcher.on_cancel(self.ticket, now)
            self.completion.finish(now)

    def _on_done(self) -> None:
        self.handoffs.abandon(NotFound("The request has ended"))
        self.meter()


def _no_standing() -> None:
    """No request is counted."""


def _no_meter() -> None:
    """No usage is recorded."""
