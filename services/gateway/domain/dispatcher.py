"""Who goes where and when: the gateway's one owner of queues, routes and requests in flight.

Events come in as method calls with `now`; everything that must happen outside leaves through `Effects`. What decides:

1. A new request goes at once to the least-loaded ready instance that takes it, unless others of its model wait already.
2. Otherwise it waits, first come first served, if fewer than the model's bound wait; beyond, it is refused with a time to come back.
3. Demand is told when the first waiter comes, then every second, and once with 0 when the last has gone.
4. A request refused before anything came of it (draining, nobody listens) goes back to its place in the queue; the instance is left alone
   for a while. After MAX_ATTEMPTS it fails.
5. A request whose instance died goes back, to go on elsewhere from where it was, if what its client has got, if anything, can be continued;
   otherwise it fails. It may be what they die of: it fails with the second death in a row, without a token in between, if it was alone there, and
   with the fourth at the latest; after two those that were not alone are sent on one at a time, so that one of them does not take the others
   along. Deaths that find it waiting in the engine are rather others' doing: of those MAX_UNHEARD may follow each other, MAX_LOST other losses,
   and MAX_LOSSES of all.
6. An instance that has said nothing of a request for ASK_AFTER_S is asked whether it has it. If not, its last words were lost: as 5.
7. A waiter whose time is over fails; so do all waiters of a model whose load failed for good.
"""

from __future__ import annotations

from services.gateway.domain.arrivals import Arrivals
from services.gateway.domain.effects import Effects
from services.gateway.domain.failover import (
    MAX_ATTEMPTS,
    bearable,
    count,
    deadly,
    died_by_itself,
    doubtful,
    gone,
    missing,
    suspected,
)
from services.gateway.domain.model_queue import Queue
from services.gateway.domain.route_table import Route, Routes
from services.gateway.domain.ticket import Stage, Ticket
from shared.contracts.demand import DEMAND_INTERVAL_S, DemandNoted, LoadFailed
from shared.contracts.node import InstanceState, NodeStatus
from shared.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineKilled,
    InstanceDraining,
    ShuttingDown,
    ThawError,
    Unavailable,
    from_body,
)


class Dispatcher:
    def __init__(self, gateway: str, effects: Effects) -> None:
        self._gateway = gateway
        self._effects = effects
        self.routes = Routes()
        self._queues: dict[str, Queue] = {}
        self._sent: dict[str, Ticket] = {}
        self._arrivals: dict[str, Arrivals] = {}
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
        self._arrivals.setdefault(ticket.model, Arrivals()).came(now)
        queue = self._queues.get(ticket.model)
        route = self.routes.choose(ticket.model, now) if queue is None or not queue.waiting else None
        if route is not None:
            self._send(ticket, route, now)
        elif queue is not None and len(queue.waiting) >= max_waiting:
            self._fail(ticket, queue.full(ticket.model, now))
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

    def on_progress(self, ticket: Ticket, now: float) -> None:
        """The present attempt has brought a token."""
        cleared = suspected(ticket)
        ticket.deaths = ticket.lost = ticket.unheard = ticket.refusals = 0
        ticket.first, ticket.avoid = None, frozenset()
        if cleared:
            self._pump(ticket.model, now)

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
            self._lost(ticket, now, error, died=not isinstance(error, ShuttingDown | EngineKilled))

    def on_missing(self, ticket: Ticket, attempt_id: str, now: float) -> None:
        """The instance has no such request (any more). What it last said of it may still be under way."""
        if ticket.stage is Stage.SENT and ticket.attempt_id == attempt_id:
            ticket.missing_at = now

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
        for model in [m for m, arrivals in self._arrivals.items() if arrivals.idle(now)]:
            del self._arrivals[model]
        for ticket in list(self._sent.values()):
            if now >= ticket.sent_at + ticket.response_timeout - ticket.spent:
                seconds = f"{ticket.response_timeout:g} s"
                self.on_broken(ticket, DeadlineExceeded(f"the answer of {ticket.model} was not complete after {seconds}"), now)
            elif missing(ticket, now):
                self._effects.cancel(ticket)  # should it come there after all
                self._lost(ticket, now)
            elif gone(ticket, self.routes.get(ticket.instance_id or ""), now, node_known=self.routes.node_known(ticket.node)):
                route = self.routes.get(ticket.instance_id or "")
                self._lost(ticket, now, died=route is None or died_by_itself(route.status))
            elif doubtful(ticket, now):
                ticket.asked_at = now
                self._effects.inquire(ticket)
        for model, queue in list(self._queues.items()):
            for ticket in [t for t in queue.waiting.values() if now >= t.queue_deadline]:
                self._leave(ticket, now)
                self._effects.fail(ticket, queue.timed_out(ticket, now))
            self._pump(model, now)
            if queue.waiting and (queue.told_at is None or now - queue.told_at >= DEMAND_INTERVAL_S):
                self._tell(model, queue, now)

    # What follows from them.

    def _pump(self, model: str, now: float) -> None:
        queue = self._queues.get(model)
        if queue is None or self.routes.choose(model, now) is None:
            return
        for ticket in list(queue.waiting.values()):
            if suspected(ticket) and any(t.model == model and suspected(t) for t in self._sent.values()):
                continue
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
        queue.put_back(ticket)
        self._pump(ticket.model, now)
        if ticket.stage is Stage.QUEUED:
            self._effects.requeued(ticket)
            if len(queue.waiting) == 1:
                self._tell(ticket.model, queue, now)

    def _lost(self, ticket: Ticket, now: float, error: ThawError | None = None, *, died: bool = False) -> None:
        count(ticket, told=error is not None, died=died)
        fatal = deadly(ticket, shared=self.routes.shared(ticket.instance_id or ""))
        if bearable(ticket) and not fatal and not ticket.begun:
            self._requeue(ticket, now)
            return
        route = self.routes.get(ticket.instance_id or "")
        self._leave(ticket, now)
        if error is None:
            reason = route.status.error.message if route is not None and route.status.error is not None else "its engine is gone"
            error = EngineFailed(f"{ticket.model} stopped while answering: {reason}")
        if fatal:
            why = f"{ticket.deaths} engines in a row died while they served this request, which may be why"
            error = EngineFailed(f"{error.message} ({why})", should_retry=False)
        self._effects.fail(ticket, error)

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
        self._effects.demand(queue.demand(self._gateway, model, self.in_flight(model), self._arrivals.get(model), now))
