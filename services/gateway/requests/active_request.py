"""One request's conversation with its engines and its client, from its validation to its record."""

from __future__ import annotations

import time
from typing import Any

from services.gateway.requests.replay_filter import Surplus
from services.gateway.requests.response_reader import Heard, Reading
from shared.errors import ThawError, Unavailable, Unreachable


class Exchange(Reading):
    """Everything about one request. Only the gateway's loop touches it."""

    # Towards the engine.

    def sent(self, now: float) -> None:
        """A (new) attempt begins: note the instance, and the start that the request waited for."""
        move = self.move if self.move is not None and self.move.to == self.ticket.instance_id else None
        self.resume = self._resume(move.prepared if move is not None else "")
        self.handovers.sent(self.ticket, move, self.made.tokens if self.resume is not None else None, self.chunk_at, now)
        if move is not None:
            move.left.set()
        if self.resume is None:
            self.restart()
            self.sent_at = now
        else:
            self._go_on()
        route = self._dispatcher.routes.get(self.ticket.instance_id or "")
        if route is None:
            return
        self.revision = route.status.revision
        if self.resume is not None:
            return
        self.instance = route.status
        self.cold_ready_at = None
        if route.ready_since is not None and route.ready_since > self.ticket.arrived:
            self.cold_ready_at = route.ready_since
            self.heard.append(Heard(route.ready_since, route.start_phases))

    def _resume(self, prepared: str = "") -> dict[str, Any] | None:
        told = self.relay is None or self.relay.streams
        return self.made.resume(prepared, self.surplus, told=told) if self.ticket.resumes else None

    @property
    def continues(self) -> bool:
        """Whether the next attempt would go on from where this one is."""
        return self._resume() is not None

    def go_on(self, too_many: list[dict[str, Any]]) -> None:
        """Expect what an engine says that goes on from here, or from before these messages."""
        self.surplus = self.surplus.after(too_many)
        self.resume = self._resume()
        self._go_on()

    def _go_on(self) -> None:
        """Expect the rest of an answer of which an engine has made a part."""
        self._seq, self._progressed = 0, False
        self.refusal = self.lost = None
        if self.relay is not None and not self.relay.streams:
            self.relay = None

    def restart(self) -> None:
        """Expect an answer from its first message on."""
        self._seq, self._progressed = 0, False
        self.made.reset()
        self.resume = None
        self.ticket.resumes = False
        self.refusal = self.lost = None
        self.surplus = Surplus()
        self.relay = None
        self.first_at = self.first_at if self.told else None
        self.sink.reset()
        self.heard.clear()

    @property
    def received(self) -> int:
        """Messages of the present attempt that have been taken."""
        return self._seq

    def on_no_responders(self) -> None:
        self._refused(Unreachable(f"nobody answers for instance {self.ticket.instance_id}"), time.monotonic())

    def on_unsendable(self, error: ThawError) -> None:
        self._break(error)

    def requeued(self) -> None:
        """It waits for an instance, having had one."""
        self.give_up_move(Unavailable("the instance that it was to go to did not answer"))
        if self.on_waiting is not None:
            self.on_waiting()

    # Towards the client.

    async def client_left(self) -> None:
        """The client is gone; whether that ends the request is for its Idempotency-Key to say, if it has one."""
        if self.key is not None:
            await self.key.client_left()
        else:
            self.leave()

    async def settled(self) -> None:
        """Wait until a failed request may be repeated."""
        if self.key is not None:
            await self.key.settled()

    def leave(self) -> None:
        """The client is gone: leave the queue, or have the engine stop."""
        if not self.ended:
            self.gone = True
            self._dispatcher.on_cancel(self.ticket, time.monotonic())
            self._end(time.monotonic())
