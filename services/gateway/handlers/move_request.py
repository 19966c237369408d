"""`MoveRequest`: have the engine of a running request stop, and another one go on.

1. The request is over: `not_found`. The order is older than one that the request has seen: `stale_token`.
2. It is where it is to go already: said so. Another move of it is under way, it waits for an instance, runs elsewhere than thought, cannot be
   gone on with, or the destination cannot take it: `conflict`, and nothing has happened.
3. The source is asked to stop. If it refuses, nothing has happened. If it is gone or says nothing, the request goes on from what was heard.
4. From there on the request is on its way, whatever becomes of the move: to the destination, or, where that refuses or dies, to any other, the
   source first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from opentelemetry.trace import SpanContext, get_current_span

from services.gateway.domain.ticket import Stage
from services.gateway.loop import Gateway
from services.gateway.requests.active_request import Exchange
from services.gateway.requests.handoff import Move
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.migration import MoveRequest, RequestMoved, YieldInfer
from shared.contracts.node import InstanceState
from shared.errors import Conflict, DeadlineExceeded, NotFound, StaleToken, ThawError, Unreachable

YIELDED_WITHIN_S = 3.0
"""Longest wait for a source to stop."""


class Mover:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def on_control(self, order: MoveRequest) -> RequestMoved:
        """Raises what `MoveRequest` says."""
        exchange = self._gateway.exchange_of(order.request_id)
        if exchange is None or exchange.ended:
            raise NotFound("the request is over")
        if order.token < exchange.fence:
            raise StaleToken(f"the request has seen an order with token {exchange.fence}, and this one has {order.token}")
        if (there := self._there(exchange, order)) is not None:
            return there
        move = exchange.move
        if move is None or move.migration_id != order.migration_id:
            self._check(exchange, order)
            exchange.fence = order.token
            move = exchange.move = Move(order.migration_id, order.token, order.instance_id, order.prepared, _here())
            await self._stop_source(exchange, move)
        return await asyncio.shield(move.done)

    def _there(self, exchange: Exchange, order: MoveRequest) -> RequestMoved | None:
        """Step 2: an order that was carried out, and is repeated."""
        if exchange.move is not None or exchange.ticket.instance_id != order.instance_id:
            return None
        made = exchange.handovers.of(order.migration_id)
        tokens, pause = (made.tokens, made.pause_ms or 0.0) if made is not None else (exchange.made.tokens, 0.0)
        return RequestMoved(instance_id=order.instance_id, tokens=tokens, pause_ms=pause)

    def _check(self, exchange: Exchange, order: MoveRequest) -> None:
        """Step 2. Raises `Conflict`."""
        ticket = exchange.ticket
        if exchange.move is not None:
            raise Conflict("the request is being moved already")
        if ticket.stage is not Stage.SENT:
            raise Conflict("the request waits for an instance")
        if ticket.instance_id != order.source_instance:
            raise Conflict(f"the request runs on {ticket.instance_id}, not on {order.source_instance}")
        if exchange.made.fixed:
            raise Conflict(f"nobody else can go on with the answer: {exchange.made.fixed}")
        route = self._gateway.dispatcher.routes.get(order.instance_id)
        if route is None or route.status.state is not InstanceState.READY or route.status.model != ticket.model:
            raise Conflict(f"instance {order.instance_id} is not known to be ready for {ticket.model}")
        if route.status.revision != exchange.revision:
            raise Conflict(f"instance {order.instance_id} has weights of revision {route.status.revision}, not {exchange.revision}")

    async def _stop_source(self, exchange: Exchange, move: Move) -> None:
        """Step 3."""
        attempt, source = exchange.ticket.attempt_id, exchange.ticket.instance_id or ""
        patience = YIELDED_WITHIN_S
        try:
            stop = YieldInfer(request_id=attempt, deadline_ms=int(YIELDED_WITHIN_S * 1e3))
            await self._gateway.mesh.request(subjects.engine_control(source), stop, Done)
        except (Unreachable, DeadlineExceeded):
            patience = 0.0  # it is dead, or as good as that
        except NotFound:
            pass  # its last words are on their way, or lost
        except ThawError as e:
            exchange.give_up_move(e)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await move.left.wait()
        self._hand_over(exchange, move, attempt)

    def _hand_over(self, exchange: Exchange, move: Move, attempt: str) -> None:
        """Step 3, where the source has not said that it has stopped."""
        ticket = exchange.ticket
        if exchange.ended or exchange.move is not move or ticket.attempt_id != attempt or ticket.stage is not Stage.SENT:
            return
        gateway = self._gateway
        gateway.cancel(ticket)
        gateway.dispatcher.on_yielded(ticket, move.to, time.monotonic())


def _here() -> SpanContext | None:
    """The span that the order came under."""
    context = get_current_span().get_span_context()
    return context if context.is_valid else None
