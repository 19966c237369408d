"""The queue of requests that wait for one model, in the order of fair queueing."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import takewhile

from services.gateway.domain.arrivals import Arrivals
from services.gateway.domain.fair_queue import PriorityClass, choose_dropped, flow_of
from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import MAX_KEYS, Demand, DemandNoted, KeyDemand
from shared.errors import QueueFull, QueueTimeout

DEFAULT_RETRY_MS = 2_000
_MAX_TRACEPARENTS = 32
InFlight = Mapping[tuple[int, str], tuple[int, float]]
"""Requests that instances have, and the weight of their key, by priority and key."""


@dataclass(slots=True)
class ModelQueue:
    """Waiting requests, and the scheduler's last reply about them.

    Attributes:
        waiting: The requests in the order in which they are served; changed by the methods only.
        published_at: Time at which demand was last published; None: never.
        reply: The scheduler's last reply, received at `replied_at`.
    """

    waiting: OrderedDict[str, Ticket] = field(default_factory=OrderedDict)
    published_at: float | None = None
    reply: DemandNoted | None = None
    replied_at: float = 0.0
    _classes: dict[int, PriorityClass] = field(default_factory=dict)

    def eta_ms(self, now: float) -> int | None:
        """Estimate when the model is ready; None if the scheduler gave no estimate."""
        if self.reply is None or self.reply.eta_ms is None:
            return None
        return max(0, int(self.reply.eta_ms - (now - self.replied_at) * 1e3))

    def demand(self, gateway_id: str, model: str, in_flight: InFlight, arrivals: Arrivals | None, now: float) -> Demand:
        """Build the message that reports this queue to the scheduler."""
        oldest_at = min((t.arrived_at for t in self.waiting.values()), default=None)
        parents = [t.traceparent for t in self.waiting.values() if t.traceparent]
        return Demand(
            gateway=gateway_id,
            model=model,
            waiting=len(self.waiting),
            in_flight=sum(count for count, _ in in_flight.values()),
            oldest_wait_ms=int((now - oldest_at) * 1e3) if oldest_at is not None else 0,
            window=arrivals.window(now) if arrivals is not None else 0,
            peak=arrivals.peak(now) if arrivals is not None else 0,
            traceparents=tuple(parents[:_MAX_TRACEPARENTS]),
            keys=self._list_keys(in_flight),
        )

    def _list_keys(self, in_flight: InFlight) -> tuple[KeyDemand, ...]:
        """Count the requests of each key and priority; of many the largest numbers."""
        weights = {(t.priority, t.key): t.weight for t in self.waiting.values()}
        weights |= {flow: weight for flow, (_, weight) in in_flight.items()}
        waiting = {(priority, key): n for priority, found in self._classes.items() for key, n in found.waiting.items()}
        counts = ((waiting.get(flow, 0), in_flight.get(flow, (0, 0.0))[0], flow) for flow in weights)
        return tuple(
            KeyDemand(flow=flow_of(flow[1]), weight=weights[flow], priority=flow[0], waiting=n, in_flight=sent)
            for n, sent, flow in nlargest(MAX_KEYS, counts)
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

    def insert(self, ticket: Ticket) -> None:
        """Insert a new request at the place that its priority and its key's share give it."""
        ticket.start_tag = self._class(ticket).clock.tag(ticket.key, ticket.cost)
        self._place(ticket)

    def reinsert(self, ticket: Ticket) -> None:
        """Insert a request that lost its instance before the others of its priority.

        Among such requests the order of arrival counts. Among requests that arrived at the same
        time, those that had an instance precede the others.
        """
        ticket.start_tag = min(ticket.start_tag, self._class(ticket).clock.time)
        self._place(ticket)

    def _class(self, ticket: Ticket) -> PriorityClass:
        return self._classes.setdefault(ticket.priority, PriorityClass())

    def _place(self, ticket: Ticket) -> None:
        order = ticket.queue_order
        later = list(takewhile(lambda t: t.queue_order > order, reversed(self.waiting.values())))
        self.waiting[ticket.id] = ticket
        self._class(ticket).waiting[ticket.key] += 1
        for moved in reversed(later):
            self.waiting.move_to_end(moved.id)

    def serve(self, ticket: Ticket, *, is_in_order: bool = True) -> None:
        """Remove a request that is sent to an instance.

        Args:
            is_in_order: It was the first one, rather than sent because its key is below its share.
        """
        self._remove(ticket)
        if is_in_order:
            self._class(ticket).clock.advance(ticket.start_tag)

    def waiting_by_key(self) -> Counter[str]:
        """Count the waiting requests of each key."""
        return sum((found.waiting for found in self._classes.values()), Counter())

    def keys(self) -> set[str]:
        """Return the keys whose requests wait."""
        return {key for found in self._classes.values() for key in found.waiting}

    def withdraw(self, ticket: Ticket) -> bool:
        """Remove a request that ends without service. Returns whether it waited."""
        if ticket.id not in self.waiting:
            return False
        self._remove(ticket)
        self._class(ticket).clock.withdraw(ticket.key, ticket.start_tag, ticket.cost)
        return True

    def _remove(self, ticket: Ticket) -> None:
        del self.waiting[ticket.id]
        self._class(ticket).remove(ticket.key)

    def find_dropped(self, new: Ticket) -> Ticket | None:
        """Return the request that gives way to a new one in a full queue; None: none does.

        1. A request of the lowest priority gives way to one of a higher priority, and never the
           reverse.
        2. Of these, the last one of the key that has the most. At equal priority it may be the new
           request's own key: then the new request is refused.
        3. A request that had an instance does not give way.
        """
        lowest = min((priority for priority, found in self._classes.items() if found.waiting), default=new.priority)
        if lowest > new.priority:
            return None
        if lowest < new.priority and (found := self._find_lower(new.priority)) is not None:
            return found
        waiting = self._class(new).waiting
        if (dropped := choose_dropped(waiting, new.key)) == new.key:
            return None
        of_key = (t for t in reversed(self.waiting.values()) if t.priority == new.priority and t.key == dropped)
        return next((t for t in of_key if not t.attempts), None)

    def _find_lower(self, priority: int) -> Ticket | None:
        """Return the request of a lower priority that gives way; None if each had an instance."""
        found = [t for t in self.waiting.values() if t.priority < priority and not t.attempts]
        lowest = min((t.priority for t in found), default=priority)
        found = [t for t in found if t.priority == lowest]
        counts = Counter(t.key for t in found)
        return max(reversed(found), key=lambda t: (counts[t.key], t.key), default=None)
