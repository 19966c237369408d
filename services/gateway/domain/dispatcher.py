"""Who goes where and when: the gateway's one owner of queues, routes and requests in flight.

Events come in as method calls with `now`; everything that must happen outside leaves through `Effects`. What decides:

1. A new request goes at once to the least-loaded ready instance that takes it, unless others of its model wait already.
2. Otherwise it waits, first come first served, if fewer than the model's bound wait; beyond, it is refused with a time to come back.
3. Demand is told when the first waiter comes, then every second, and once with 0 when the last has gone.
4. A request refused before anything came of it (draining, nobody listens) goes back to its place in the queue; the instance is left alone
   for a while. After MAX_ATTEMPTS it fails.
5. A request whose instance died goes back, to go on elsewhere from where it was, if what its client has got, if anything, can be continued;
   otherwise it fails. So it does after MAX_LOST deaths without a token in between, or MAX_LOSSES at all: it may be what they die of. Deaths
   that find it waiting in the engine are rather others' doing: of those MAX_UNHEARD may follow each other.
6. A waiter whose time is over fails; so do all waiters of a model whose load failed for good.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.domain.routes import Route, Routes
from services.gateway.domain.ticket import Stage, Ticket
from shared.contracts.demand import DEMAND_INTERVAL_S, Demand, DemandNoted, LoadFailed
from shared.contracts.node import InstanceState, NodeStatus
from shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    InstanceDraining,
    QueueFull,
    QueueTimeout,
    ShuttingDown,
    ThawError,
    Unavailable,
    from_body,
)

MAX_ATTEMPTS = 12
MAX_LOST = 3
MAX_UNHEARD = 32
MAX_LOSSES = 64
GONE_GRACE_S = 0.3
"""How long an instance reported failed or stopped may still have messages under way."""
ABSENT_GRACE_S = 3.0
"""How long an instance that no status mentions may be silent: a nodeagent that has just come back adopts its engines first."""
STALL_S = 30.0
"""How long a request may be silent while its whole node is: an engine whose nodeagent is gone goes on serving."""
IDLE_GRACE_S = 10.0
"""How long an instance may say that it has nothing to do before a request it was given is taken for lost (NATS restarted meanwhile)."""
DEFAULT_RETRY_MS = 2_000
_MAX_TRACEPARENTS = 32


class Effects(Protocol):
    """The one way out of the dispatcher."""

    def send(self, ticket: Ticket) -> None:
        """Give the request to the instance it names."""

    def cancel(self, ticket: Ticket) -> None:
        """Tell the instance to stop working on the request."""

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        """Answer the client with an error."""

    def demand(self, demand: Demand) -> None:
        """Tell the scheduler what waits."""

    def requeued(self, ticket: Ticket) -> None:
        """The request, which an instance had, waits for another one."""


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


class Dispatcher:
    def __init__(self, gateway: str, effects: Effects) -> None:
        self._gateway = gateway
        self._effects = effects
        self.routes = Routes()
        self._queues: dict[str, Queue] = {}
        self._sent: dict[str, Ticket] = {}
        self._closing = False

    # What is known, for metrics, comments and headers.

    def waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waiting) if queue else 0

    def in_flight(self, model: str) -> int:
        return sum(t.model == model for t in self._sent.values())

    def models(self) -> set[str]:
        return self._queues.keys() | {t.model for t in self._sent.values()}

    def queue(self, model: str) -> Queue | None:
        return self._queues.get(model)

    # Events.

    def on_request(self, ticket: Ticket, max_waiting: int, now: float) -> None:
        if self._closing:
            self._fail(ticket, ShuttingDown())
            return
        queue = self._queues.get(ticket.model)
        route = self.routes.choose(ticket.model, now) if queue is None or not queue.waiting else None
        if route is not None:
            self._send(ticket, route, now)
        elif queue is not None and len(queue.waiting) >= max_waiting:
            self._fail(ticket, self._full(ticket.model, queue, now))
        else:
            ticket.stage = Stage.QUEUED
            queue = self._queues.setdefault(ticket.model, Queue())
            queue.waiting[ticket.id] = ticket
            if len(queue.waiting) == 1:
                self._tell(ticket.model, queue, now)

    def on_adopted(self, ticket: Ticket, attempt_id: str, instance_id: str, node: str, now: float) -> None:
        """A request that a gateway which is gone had given to an instance is ours from now on."""
        ticket.attempt_id, ticket.instance_id, ticket.node = attempt_id, instance_id, node
        ticket.stage, ticket.attempts, ticket.sent_at = Stage.SENT, ticket.attempts + 1, now
        self.routes.hold(instance_id)
        self._sent[ticket.id] = ticket

    def on_disowned(self, ticket: Ticket, now: float) -> None:
        """Another gateway sees to the request; its engine, if it has one, goes on."""
        self._leave(ticket, now)

    def on_cancel(self, ticket: Ticket, now: float) -> None:
        """The client is gone, or its answer cannot be used any more."""
        if ticket.stage is Stage.SENT:
            self._effects.cancel(ticket)
        self._leave(ticket, now)

    def on_heard(self, ticket: Ticket, now: float) -> None:
        """The engine said something about the request."""
        if not ticket.heard_at and ticket.instance_id is not None:
            self.routes.accepted(ticket.instance_id)
        ticket.heard_at = now

    def on_finished(self, ticket: Ticket, now: float) -> None:
        self._leave(ticket, now)

    def on_progress(self, ticket: Ticket) -> None:
        """The present attempt has brought a token."""
        ticket.lost = ticket.unheard = ticket.refusals = 0
        ticket.first, ticket.avoid = None, frozenset()

    def on_refused(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """The engine would not take it (draining), cannot go on with it, or nobody listens there."""
        if ticket.stage is not Stage.SENT or ticket.instance_id is None:
            return
        ticket.refusals += 1
        particular = ticket.resumes and not isinstance(error, InstanceDraining | Unavailable)
        if particular:
            ticket.avoid |= {ticket.instance_id}
        else:
            self.routes.refused(ticket.instance_id, now)
        if ticket.begun or ticket.refusals >= MAX_ATTEMPTS or (particular and self._nobody_left(ticket)):
            self._leave(ticket, now)
            self._effects.fail(ticket, error if isinstance(error, InstanceDraining) else EngineFailed(error.message))
        else:
            self._requeue(ticket, now)

    def _nobody_left(self, ticket: Ticket) -> bool:
        """Whether every instance that there is has refused to go on with the request."""
        alive = [r for r in self.routes.of(ticket.model) if r.status.state is InstanceState.READY or r.status.state.starting]
        return all(r.status.instance_id in ticket.avoid for r in alive)

    def on_engine_lost(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """The instance says itself that its engine broke down under the request."""
        if ticket.stage is Stage.SENT and ticket.instance_id is not None:
            self.routes.refused(ticket.instance_id, now)
            self._lost(ticket, now, error)

    def on_gap(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """Some of what the engine said did not come: go on from what did."""
        if ticket.stage is Stage.SENT:
            self._effects.cancel(ticket)
            self._lost(ticket, now, error)

    def on_yielded(self, ticket: Ticket, to: str | None, now: float) -> None:
        """The engine has stopped for the request to go on at instance `to`; if that is not to be had, wherever there is room, there first."""
        if ticket.stage is not Stage.SENT:
            return
        ticket.first = ticket.instance_id
        route = self.routes.get(to) if to is not None else None
        if route is None or route.status.state is not InstanceState.READY:
            self._requeue(ticket, now)
            return
        self._release(ticket, now)
        self._send(ticket, route, now)
        self._pump(ticket.model, now)

    def on_broken(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """Its stream cannot be trusted any more (a gap, an unread buffer)."""
        self.on_cancel(ticket, now)
        self._effects.fail(ticket, error)

    def on_status(self, status: NodeStatus, now: float) -> None:
        for model in self.routes.on_status(status, now):
            self._pump(model, now)

    def on_noted(self, model: str, noted: DemandNoted, now: float) -> None:
        queue = self._queues.get(model)
        if queue is not None:
            queue.noted, queue.noted_at = noted, now

    def on_load_failed(self, event: LoadFailed, now: float) -> None:
        self._fail_waiting(event.model, from_body(event.error), now)

    def on_model_removed(self, model: str, error: ThawError, now: float) -> None:
        self._fail_waiting(model, error, now)

    def on_closing(self) -> None:
        """Take no new request; those here go on."""
        self._closing = True

    def on_tick(self, now: float) -> None:
        self.routes.on_tick(now)
        for ticket in list(self._sent.values()):
            if now >= ticket.sent_at + ticket.response_timeout - ticket.spent:
                seconds = f"{ticket.response_timeout:g} s"
                self.on_broken(ticket, DeadlineExceeded(f"the answer of {ticket.model} was not complete after {seconds}"), now)
            elif self._instance_gone(ticket, now):
                self._lost(ticket, now)
        for model, queue in list(self._queues.items()):
            for ticket in [t for t in queue.waiting.values() if now >= t.queue_deadline]:
                self._leave(ticket, now)
                self._effects.fail(ticket, self._timed_out(ticket, queue, now))
            self._pump(model, now)
            if queue.waiting and (queue.told_at is None or now - queue.told_at >= DEMAND_INTERVAL_S):
                self._tell(model, queue, now)

    # What follows from them.

    def _pump(self, model: str, now: float) -> None:
        queue = self._queues.get(model)
        if queue is None or self.routes.choose(model, now) is None:
            return
        for ticket in list(queue.waiting.values()):
            route = self.routes.choose_for(ticket, now)
            if route is not None:
                del queue.waiting[ticket.id]
                self._send(ticket, route, now)
            elif not ticket.avoid:
                return
        if not queue.waiting:
            self._drop_queue(model, queue, now)

    def _send(self, ticket: Ticket, route: Route, now: float) -> None:
        ticket.stage = Stage.SENT
        ticket.instance_id = route.status.instance_id
        ticket.attempts += 1
        ticket.attempt_id = f"{ticket.id}-{ticket.attempts}"
        ticket.sent_at, ticket.heard_at, ticket.admitted = now, 0.0, False
        ticket.node = route.node
        self.routes.hold(route.status.instance_id)
        self._sent[ticket.id] = ticket
        self._effects.send(ticket)

    def _requeue(self, ticket: Ticket, now: float) -> None:
        self._release(ticket, now)
        ticket.stage, ticket.instance_id = Stage.QUEUED, None
        if ticket.resumes:
            ticket.queue_deadline = max(ticket.queue_deadline, now + ticket.queue_timeout)
        queue = self._queues.setdefault(ticket.model, Queue())
        queue.waiting[ticket.id] = ticket
        for later in [t for t in queue.waiting.values() if (t.arrived, not t.attempts) > (ticket.arrived, False)]:
            queue.waiting.move_to_end(later.id)
        self._pump(ticket.model, now)
        if ticket.stage is Stage.QUEUED:
            self._effects.requeued(ticket)
            if len(queue.waiting) == 1:
                self._tell(ticket.model, queue, now)

    def _lost(self, ticket: Ticket, now: float, error: ThawError | None = None) -> None:
        ticket.losses += 1
        if ticket.admitted or error is not None:  # a host that speaks for its dead engine had given it the request
            ticket.lost += 1
        else:
            ticket.unheard += 1
        bearable = ticket.lost <= MAX_LOST and ticket.unheard <= MAX_UNHEARD and ticket.losses <= MAX_LOSSES
        if bearable and not ticket.begun:
            self._requeue(ticket, now)
            return
        route = self.routes.get(ticket.instance_id or "")
        self._leave(ticket, now)
        if error is not None:
            self._effects.fail(ticket, error)
            return
        reason = route.status.error.message if route is not None and route.status.error is not None else "its engine is gone"
        self._effects.fail(ticket, EngineFailed(f"{ticket.model} stopped while answering: {reason}"))

    def _leave(self, ticket: Ticket, now: float) -> None:
        """Take the request out of wherever it is; harmless if it has left already."""
        if ticket.stage is Stage.SENT:
            self._release(ticket, now)
            ticket.stage = Stage.DONE
            self._pump(ticket.model, now)
        elif ticket.stage is Stage.QUEUED:
            ticket.stage = Stage.DONE
            queue = self._queues.get(ticket.model)
            if queue is not None and queue.waiting.pop(ticket.id, None) is not None and not queue.waiting:
                self._drop_queue(ticket.model, queue, now)

    def _release(self, ticket: Ticket, now: float) -> None:
        ticket.spent = ticket.spent + now - ticket.sent_at if ticket.resumes else 0.0
        del self._sent[ticket.id]
        self.routes.release(ticket.instance_id or "")

    def _instance_gone(self, ticket: Ticket, now: float) -> bool:
        silent = now - max(ticket.heard_at, ticket.sent_at)
        route = self.routes.get(ticket.instance_id or "")
        if route is None:
            return silent >= (ABSENT_GRACE_S if self.routes.node_known(ticket.node) else STALL_S)
        if route.status.state in (InstanceState.FAILED, InstanceState.STOPPED):
            return silent >= GONE_GRACE_S
        return route.idle_since is not None and min(silent, now - route.idle_since) >= IDLE_GRACE_S

    def _fail_waiting(self, model: str, error: ThawError, now: float) -> None:
        queue = self._queues.get(model)
        for ticket in list(queue.waiting.values()) if queue is not None else ():
            self._leave(ticket, now)
            self._effects.fail(ticket, error)

    def _fail(self, ticket: Ticket, error: ThawError) -> None:
        ticket.stage = Stage.DONE
        self._effects.fail(ticket, error)

    def _drop_queue(self, model: str, queue: Queue, now: float) -> None:
        self._tell(model, queue, now)
        del self._queues[model]

    def _tell(self, model: str, queue: Queue, now: float) -> None:
        queue.told_at = now
        oldest = next(iter(queue.waiting.values()), None)
        parents = [t.traceparent for t in queue.waiting.values() if t.traceparent]
        self._effects.demand(
            Demand(
                deadline_ms=Demand.DEADLINE_MS,
                gateway=self._gateway,
                model=model,
                waiting=len(queue.waiting),
                in_flight=self.in_flight(model),
                oldest_wait_ms=int((now - oldest.arrived) * 1e3) if oldest else 0,
                traceparents=tuple(parents[:_MAX_TRACEPARENTS]),
            )
        )

    def _full(self, model: str, queue: Queue, now: float) -> QueueFull:
        waiting = len(queue.waiting)
        retry = max(1_000, queue.eta_ms(now) or DEFAULT_RETRY_MS)
        error = QueueFull(
            f"{waiting} requests wait for {model} already, which is as many as may; this one would have been number {waiting + 1}",
            param="model",
            retry_after_ms=retry,
        )
        error.position = waiting + 1
        return error

    def _timed_out(self, ticket: Ticket, queue: Queue, now: float) -> QueueTimeout:
        reason = f": {queue.noted.reason}" if queue.noted is not None and queue.noted.reason else ""
        return QueueTimeout(
            f"{ticket.model} was not ready for this request within {now - ticket.arrived:.0f} s{reason}", param="model"
        )
