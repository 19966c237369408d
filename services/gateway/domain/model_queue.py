"""What waits for a model, and what is said of it."""

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
class Queue:
    """What waits for one model. `noted` is the scheduler's last answer, heard at `noted_at`."""

    waiting: OrderedDict[str, Ticket] = field(default_factory=OrderedDict)
    told_at: float | None = None
    noted: DemandNoted | None = None
    noted_at: float = 0.0

    def eta_ms(self, now: float) -> int | None:
        if self.noted is None or self.noted.eta_ms is None:
            return None
        return max(0, int(self.noted.eta_ms - (now - self.noted_at) * 1e3))

    def demand(self, gateway: str, model: str, in_flight: int, arrivals: Arrivals | None, now: float) -> Demand:
        """What the scheduler is told."""
        oldest = next(iter(self.waiting.values()), None)
        parents = [t.traceparent for t in self.waiting.values() if t.traceparent]
        return Demand(
            gateway=gateway,
            model=model,
            waiting=len(self.waiting),
            in_flight=in_flight,
            oldest_wait_ms=int((now - oldest.arrived) * 1e3) if oldest else 0,
            window=arrivals.window(now) if arrivals is not None else 0,
            peak=arrivals.peak(now) if arrivals is not None else 0,
            traceparents=tuple(parents[:_MAX_TRACEPARENTS]),
        )

    def full(self, model: str, now: float) -> QueueFull:
        waiting = len(self.waiting)
        retry = max(1_000, self.eta_ms(now) or DEFAULT_RETRY_MS)
        error = QueueFull(
            f"{waiting} requests wait for {model} already, which is as many as may; this one would have been number {waiting + 1}",
            param="model",
            retry_after_ms=retry,
        )
        error.position = waiting + 1
        return error

    def timed_out(self, ticket: Ticket, now: float) -> QueueTimeout:
        reason = f": {self.noted.reason}" if self.noted is not None and self.noted.reason else ""
        return QueueTimeout(
            f"{ticket.model} was not ready for this request within {now - ticket.arrived:.0f} s{reason}", param="model"
        )

    def put_back(self, ticket: Ticket) -> None:
        """At the place of its arrival; of two that came at once, the one that has been somewhere goes first."""
        self.waiting[ticket.id] = ticket
        for later in [t for t in self.waiting.values() if (t.arrived, not t.attempts) > (ticket.arrived, False)]:
            self.waiting.move_to_end(later.id)
