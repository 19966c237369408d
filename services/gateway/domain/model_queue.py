"""The queue of requests that wait for one model."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from services.gateway.domain.arrivals import Arrivals
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import Demand, DemandNoted
from shared.errors import QueueFull, QueueTimeout

DEFAULT_RETRY_MS = 2_000
_MAX_TRACEPARENTS = 32


@dataclass(slots=True)
class ModelQueue:
    """Waiting requests, and the scheduler's last reply about them.

    Attributes:
        published_at: Time at which demand was last published; None: never.
        reply: The scheduler's last reply, received at `replied_at`.
    """

    waiting: OrderedDict[str, Ticket] = field(default_factory=OrderedDict)
    published_at: float | None = None
    reply: DemandNoted | None = None
    replied_at: float = 0.0

    def eta_ms(self, now: float) -> int | None:
        """Estimate when the model is ready; None if the scheduler gave no estimate."""
        if self.reply is None or self.reply.eta_ms is None:
            return None
        return max(0, int(self.reply.eta_ms - (now - self.replied_at) * 1e3))

    def demand(self, gateway_id: str, model: str, in_flight: int, arrivals: Arrivals | None, now: float) -> Demand:
        """Build the message that reports this queue to the scheduler."""
        oldest = next(iter(self.waiting.values()), None)
        parents = [t.traceparent for t in self.waiting.values() if t.traceparent]
        return Demand(
            gateway=gateway_id,
            model=model,
            waiting=len(self.waiting),
            in_flight=in_flight,
            oldest_wait_ms=int((now - oldest.arrived_at) * 1e3) if oldest else 0,
            window=arrivals.window(now) if arrivals is not None else 0,
            peak=arrivals.peak(now) if arrivals is not None else 0,
            traceparents=tuple(parents[:_MAX_TRACEPARENTS]),
        )

    def full_error(self, model: str, now: float) -> QueueFull:
        waiting = len(self.waiting)
        retry_ms = max(1_000, self.eta_ms(now) or DEFAULT_RETRY_MS)
        error = QueueFull(
            f"The queue of {model} is full with {waiting} requests, and this one would be number {waiting + 1}. "
            f"Repeat the request in {retry_ms / 1000:.0f} s",
            param="model",
            retry_after_ms=retry_ms,
        )
        error.position = waiting + 1
        return error

    def timeout_error(self, ticket: Ticket, now: float) -> QueueTimeout:
        reason = f": {self.reply.reason}" if self.reply is not None and self.reply.reason else ""
        return QueueTimeout(
            f"{ticket.model} was not ready for this request within {now - ticket.arrived_at:.0f} s{reason}", param="model"
        )

    def reinsert(self, ticket: Ticket) -> None:
        """Insert a request that lost its instance, in order of arrival.

        Among requests that arrived at the same time, those that had an instance precede the others.
        """
        self.waiting[ticket.id] = ticket
        for later in [t for t in self.waiting.values() if (t.arrived_at, not t.attempts) > (ticket.arrived_at, False)]:
            self.waiting.move_to_end(later.id)
