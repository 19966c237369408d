"""`MoveRequest`: hand a running request off to another instance.

1. Refuse with `not_found` if the request has ended, and with `stale_token` if the order is older
   than one accepted before.
2. Reply at once if the request runs on the destination already. Refuse with `conflict` if another
   hand-off is in progress, if the request waits for an instance or runs on another source, if its
   response cannot be resumed, or if the destination cannot resume it. Nothing has happened then.
3. Ask the source to stop. If it refuses, nothing has happened. If it is gone or silent, the
   request resumes from the output received so far.
4. From there on the request continues whatever becomes of the hand-off: on the destination, or, if
   that refuses or dies, on any other instance, the source first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from opentelemetry.trace import SpanContext, get_current_span

from services.gateway.domain.ticket import Stage
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.handoff import OrderedHandoff
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.migration import MoveRequest, RequestMoved, YieldInfer
from shared.contracts.node import InstanceState
from shared.errors import Conflict, DeadlineExceeded, NotFound, StaleToken, ThawError, Unreachable

YIELD_TIMEOUT_S = 3.0
"""Longest wait for a source to stop."""


class MoveRequestHandler:
    """Handler of `MoveRequest` for the requests of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stopping: set[asyncio.Task[None]] = set()

    async def handle(self, order: MoveRequest) -> RequestMoved:
        """Hand the request off, and wait for the destination's first output.

        Raises:
            NotFound: The request has ended.
            StaleToken: A newer order was accepted before.
            Conflict: The request cannot be handed off as ordered.
        """
        request = self._gateway.request_of_attempt(order.request_id)
        if request is None or request.completion.is_done:
            raise NotFound("The request has ended")
        handoffs = request.handoffs
        if order.token < handoffs.fencing_token:
            raise StaleToken(f"The request accepted an order with token {handoffs.fencing_token}, and this one has {order.token}")
        if (completed := self._find_completed(request, order)) is not None:
            return completed
        ordered = handoffs.ordered
        if ordered is None or ordered.migration_id != order.migration_id:
            self._check(request, order)
            handoffs.fencing_token = order.token
            ordered = handoffs.ordered = OrderedHandoff(
                order.migration_id, order.token, order.instance_id, order.prepared, _current_span()
            )
            # To its end, also after the order's deadline: the source may have stopped by then.
            stopping = asyncio.create_task(self._stop_source(request, ordered), name=f"move {order.request_id}")
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            await asyncio.shield(stopping)
        return await asyncio.shield(ordered.result)

    def _find_completed(self, request: ActiveRequest, order: MoveRequest) -> RequestMoved | None:
        """Step 2: the reply to a repetition of a completed order."""
        if request.handoffs.ordered is not None or request.ticket.instance_id != order.instance_id:
            return None
        record = request.handoffs.of_migration(order.migration_id)
        tokens = record.tokens if record is not None else request.resume_state.tokens
        pause_ms = record.pause_ms or 0.0 if record is not None else 0.0
        return RequestMoved(instance_id=order.instance_id, tokens=tokens, pause_ms=pause_ms)

    def _check(self, request: ActiveRequest, order: MoveRequest) -> None:
        """Step 2. Raises `Conflict`."""
        ticket = request.ticket
        if request.handoffs.ordered is not None:
            raise Conflict("Another hand-off of the request is in progress")
        if ticket.stage is not Stage.SENT:
            raise Conflict("The request waits for an instance")
        if ticket.instance_id != order.source_instance:
            raise Conflict(f"The request runs on {ticket.instance_id}, not on {order.source_instance}")
        if reason := request.resume_state.not_resumable_reason:
            raise Conflict(f"No other engine can resume the response: {reason}")
        route = self._gateway.dispatcher.routes.get(order.instance_id)
        if route is None or route.status.state is not InstanceState.READY or route.status.model != ticket.model:
            raise Conflict(f"Instance {order.instance_id} is not known to be ready for {ticket.model}")
        revision = request.attempt.revision
        if route.status.revision != revision:
            raise Conflict(f"Instance {order.instance_id} has weights of revision {route.status.revision}, not {revision}")

    async def _stop_source(self, request: ActiveRequest, ordered: OrderedHandoff) -> None:
        """Step 3."""
        attempt_id, source = request.ticket.attempt_id, request.ticket.instance_id or ""
        timeout_s = YIELD_TIMEOUT_S
        try:
            stop = YieldInfer(request_id=attempt_id, deadline_ms=int(YIELD_TIMEOUT_S * 1e3))
            await self._gateway.mesh.request(subjects.engine_control(source), stop, Done)
        except (Unreachable, DeadlineExceeded):
            timeout_s = 0.0  # the source is gone
        except NotFound:
            pass  # its final messages are on their way, or lost
        except ThawError as e:
            request.handoffs.abandon(e)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ordered.source_released.wait()
        self._release_source(request, ordered, attempt_id)

    def _release_source(self, request: ActiveRequest, ordered: OrderedHandoff, attempt_id: str) -> None:
        """Step 3, if the source has not confirmed that it stopped."""
        ticket = request.ticket
        if request.completion.is_done or request.handoffs.ordered is not ordered:
            return
        if ticket.attempt_id != attempt_id or ticket.stage is not Stage.SENT:
            return
        self._gateway.cancel(ticket)
        self._gateway.dispatcher.on_yielded(ticket, ordered.destination, time.monotonic())


def _current_span() -> SpanContext | None:
    """Return the span of the order."""
    context = get_current_span().get_span_context()
    return context if context.is_valid else None
