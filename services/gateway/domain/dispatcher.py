"""The dispatcher: which request goes to which instance, and when.

It owns the queues, the routes and the requests in flight. Events arrive as method calls with
`now`; all side effects leave through `Effects`. The rules:

1. A new request goes at once to the least-loaded ready instance that accepts it, unless other
   requests for its model wait already.
2. Otherwise it waits. Higher priorities are served first; inside a priority the keys' requests are
   served by fair shares (`fair_queue`), those of one key in order of arrival. If the model's queue
   is full, the key with the most waiting requests of the lowest priority loses its last one, which
   may be the new one: it is refused with a time to retry.
   If all instances are full, a key that has less there than its share may still send: its requests
   do not wait for those of other keys. The engine orders them by key as well.
3. Demand is published when the first request begins to wait, then every second, and once with 0
   when the last request has left the queue.
4. A request that is refused before any output (the instance drains, or no engine listens) returns
   to its place in the queue, and the instance gets no request for a while. The request fails after
   MAX_ATTEMPTS.
5. A request whose instance was lost returns to the queue, to resume elsewhere, unless its client
   has received output that cannot be resumed; then it fails.
   A request may be what kills its engines (a poison request). It fails with the second engine
   death in a row without output in between if it was alone there, and with the fourth in any case.
   After two deaths, suspects are sent one at a time, so that one does not take the others along.
   A death while the request waits inside the engine is likelier another request's doing: up to
   MAX_LOSSES_BEFORE_ADMISSION of those are allowed in a row, MAX_MESSAGE_LOSSES other losses in a
   row, and MAX_LOSSES in all.
6. An instance that has sent nothing for a request for PROBE_AFTER_S is asked whether it has the
   request, after a reconnection to NATS after PROBE_SOON_S. If not, its final messages
   were lost: as rule 5.
7. A waiting request fails at its deadline, which time at an instance postpones. All requests that
   wait for a model fail if its load failed permanently and none of its instances is ready.
8. While the gateway's own connection to NATS does not work, routes and requests in flight are kept,
   and other requests wait. They are sent once the gateway has reconnected; rule 4 holds for
   instances that are gone by then.
"""

from __future__ import annotations

import math
from collections import Counter

from services.gateway.domain.arrivals import Arrivals
from services.gateway.domain.effects import Effects
from services.gateway.domain.failover import (
    MAX_ATTEMPTS,
    count_loss,
    has_crashed,
    is_instance_gone,
    is_missing,
    is_poison,
    is_suspect,
    may_retry,
    needs_probe,
)
from services.gateway.domain.fair_queue import is_below_share
from services.gateway.domain.model_queue import ModelQueue
from services.gateway.domain.route_table import Route, RouteTable
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

_OTHER_GATEWAYS = "\0others"
"""Stands for the keys of other gateways, which share the instances."""


class Dispatcher:
    """Owner of the queues, the routes and the requests in flight of a gateway."""

    def __init__(self, gateway_id: str, effects: Effects) -> None:
        self._gateway_id = gateway_id
        self._effects = effects
        self.routes = RouteTable()
        self._queues: dict[str, ModelQueue] = {}
        self._sent: dict[str, Ticket] = {}
        self._in_flight: dict[str, Counter[tuple[int, str]]] = {}
        """Requests in flight by model, and by their priority and key."""
        self._weights: dict[str, float] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._is_closing = False

    # State, for metrics, comments and headers.

    def count_waiting(self, model: str) -> int:
        queue = self._queues.get(model)
        return len(queue.waiting) if queue else 0

    def waiting_by_key(self) -> Counter[str]:
        """Count the waiting requests of each key, of all models."""
        return sum((queue.waiting_by_key() for queue in self._queues.values()), Counter())

    def count_in_flight(self, model: str) -> int:
        return self._in_flight[model].total() if model in self._in_flight else 0

    def count_above(self, priority: int) -> int:
        """Count the waiting requests of all models with a higher priority."""
        return sum(t.priority > priority for queue in self._queues.values() for t in queue.waiting.values())

    def _count_by_key(self, model: str) -> Counter[str]:
        """Count the requests in flight of each key."""
        found = Counter[str]()
        for (_, key), count in self._in_flight.get(model, Counter()).items():
            found[key] += count
        return found

    def models(self) -> set[str]:
        return self._queues.keys() | self._in_flight.keys()

    def queue(self, model: str) -> ModelQueue | None:
        return self._queues.get(model)

    # Events of requests.

    def on_request(self, ticket: Ticket, max_waiting: int, now: float) -> None:
        """A client sent a request (rules 1 and 2)."""
        if self._is_closing:
            self._fail(ticket, ShuttingDown())
            return
        self._arrivals.setdefault(ticket.model, Arrivals()).record(now)
        queue = self._queues.get(ticket.model)
        route = self.routes.choose(ticket.model, now) if queue is None or not queue.waiting else None
        if route is not None:
            self._send(ticket, route, now)
        elif queue is not None and len(queue.waiting) >= max_waiting:
            self._insert_into_full(queue, ticket, now)
        else:
            self._enqueue(ticket, now)

    def _insert_into_full(self, queue: ModelQueue, ticket: Ticket, now: float) -> None:
        error, dropped = queue.full_error(ticket.model, now), queue.find_dropped(ticket)
        if dropped is None:
            self._fail(ticket, error)
            return
        self._leave(dropped, now)
        self._effects.fail(dropped, error)
        self._enqueue(ticket, now)

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        ticket.stage = Stage.QUEUED
        self._weights[ticket.key] = ticket.weight
        queue = self._queues.setdefault(ticket.model, ModelQueue())
        queue.insert(ticket)
        self._pump_below_share(ticket.model, queue, now)
        if not queue.waiting:
            self._drop_queue(ticket.model, queue, now)
        elif ticket.stage is Stage.QUEUED and len(queue.waiting) == 1:
            self._publish_demand(ticket.model, queue, now)

    def on_adopted(self, ticket: Ticket, attempt_id: str, instance_id: str, node: str, now: float) -> None:
        """Adopt a request that a lost gateway had sent to an instance."""
        ticket.attempt_id, ticket.instance_id, ticket.node = attempt_id, instance_id, node
        ticket.stage, ticket.attempts, ticket.sent_at = Stage.SENT, ticket.attempts + 1, now
        self.routes.acquire(instance_id)
        self._add_sent(ticket)

    def on_disowned(self, ticket: Ticket, now: float) -> None:
        """Forget a request that another gateway serves. The request's engine continues."""
        self._leave(ticket, now)

    def on_cancel(self, ticket: Ticket, now: float) -> None:
        """The client disconnected, or its response cannot be used."""
        if ticket.stage is Stage.SENT:
            self._effects.cancel(ticket)
        self._leave(ticket, now)

    def on_abort(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """The request cannot continue: cancel it and fail it."""
        self.on_cancel(ticket, now)
        self._effects.fail(ticket, error)

    def on_message(self, ticket: Ticket, now: float) -> None:
        """The instance sent a message for the request."""
        if not ticket.last_message_at and ticket.instance_id is not None:
            self.routes.reset_backoff(ticket.instance_id)
        ticket.last_message_at = now

    def on_finished(self, ticket: Ticket, now: float) -> None:
        self._leave(ticket, now)

    def on_progress(self, ticket: Ticket, now: float) -> None:
        """The present attempt sent its first output."""
        was_suspect = is_suspect(ticket)
        ticket.engine_deaths = ticket.message_losses = ticket.losses_before_admission = ticket.refusals = 0
        ticket.preferred_instance, ticket.excluded_instances = None, frozenset()
        if was_suspect:
            self._pump(ticket.model, now)

    def on_refused(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """The instance refuses the request, or no engine listens (rule 4)."""
        if ticket.stage is not Stage.SENT or ticket.instance_id is None:
            return
        ticket.refusals += 1
        is_specific = ticket.is_resumable and not isinstance(error, InstanceDraining | Unavailable)
        if is_specific:
            ticket.excluded_instances |= {ticket.instance_id}
        else:
            self.routes.back_off(ticket.instance_id, now)
        if ticket.is_committed or ticket.refusals >= MAX_ATTEMPTS or (is_specific and self._all_excluded(ticket)):
            self._leave(ticket, now)
            self._effects.fail(ticket, error if isinstance(error, InstanceDraining) else EngineFailed(error.message))
        else:
            self._requeue(ticket, now)

    def _all_excluded(self, ticket: Ticket) -> bool:
        """True if every live instance has refused to resume the response."""
        alive = [
            r for r in self.routes.iter_routes(ticket.model) if r.status.state is InstanceState.READY or r.status.state.starting
        ]
        return all(r.status.instance_id in ticket.excluded_instances for r in alive)

    def on_engine_lost(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """The instance reports that its engine broke down under the request (rule 5)."""
        if ticket.stage is Stage.SENT and ticket.instance_id is not None:
            self.routes.back_off(ticket.instance_id, now)
            self._on_loss(ticket, now, error, has_died=not isinstance(error, ShuttingDown | EngineKilled))

    def on_missing(self, ticket: Ticket, attempt_id: str, now: float) -> None:
        """The instance no longer has the request; messages may still arrive (rule 6)."""
        if ticket.stage is Stage.SENT and ticket.attempt_id == attempt_id:
            ticket.reported_missing_at = now

    def on_reconnected(self, now: float) -> None:
        """The gateway is connected to NATS again (rules 6 and 8).

        NATS may have lost messages: silent requests are probed soon.
        """
        for ticket in self._sent.values():
            ticket.disturbed_at = now
        self.routes.is_connected = True
        for model, queue in list(self._queues.items()):
            self._pump(model, now)
            if queue.waiting:
                self._publish_demand(model, queue, now)

    def on_unprobed(self, ticket: Ticket, attempt_id: str, now: float) -> None:
        """A probe found no engine: it may be reconnecting to NATS (rule 6)."""
        if ticket.stage is Stage.SENT and ticket.attempt_id == attempt_id:
            ticket.disturbed_at = now

    def on_message_gap(self, ticket: Ticket, error: ThawError, now: float) -> None:
        """Messages of the instance were lost: resume from those that arrived (rule 5)."""
        if ticket.stage is Stage.SENT:
            self._effects.cancel(ticket)
            self._on_loss(ticket, now, error)

    def on_yielded(self, ticket: Ticket, destination: str | None, now: float) -> None:
        """The source stopped for a hand-off.

        The request goes to the instance `destination`, or, if that is not ready, to any instance,
        the source first.
        """
        if ticket.stage is not Stage.SENT:
            return
        ticket.preferred_instance = ticket.instance_id
        route = self.routes.get(destination) if destination is not None else None
        if route is None or route.status.state is not InstanceState.READY:
            self._requeue(ticket, now)
            return
        self._release(ticket, now)
        self._send(ticket, route, now)
        self._pump(ticket.model, now)

    # Events of the mesh.

    def on_status(self, status: NodeStatus, now: float, changed: frozenset[str] | None = None) -> None:
        """Apply a node's status.

        Args:
            status: The whole status.
            now: Monotonic seconds.
            changed: The instances that differ from the last status; None: any may.
        """
        for model in self.routes.on_status(status, now, changed):
            self._pump(model, now)

    def on_demand_reply(self, model: str, reply: DemandNoted, now: float) -> None:
        queue = self._queues.get(model)
        if queue is not None:
            queue.reply, queue.replied_at = reply, now

    def on_load_failed(self, event: LoadFailed, now: float) -> None:
        """The model could not be loaded. A ready instance still serves its requests (rule 7)."""
        if not any(route.is_ready for route in self.routes.iter_routes(event.model)):
            self._fail_waiting(event.model, from_body(event.error), now)

    def on_model_removed(self, model: str, error: ThawError, now: float) -> None:
        self._fail_waiting(model, error, now)

    def on_closing(self) -> None:
        """Refuse new requests; active ones continue."""
        self._is_closing = True

    def on_tick(self, now: float, connected_since: float | None = -math.inf) -> None:
        """Check deadlines, losses and probes, and publish demand.

        Args:
            now: Monotonic seconds.
            connected_since: Time since which the gateway's own connection to NATS works; None: it
                does not.
        """
        self.routes.on_tick(now, connected_since)
        for model in [m for m, arrivals in self._arrivals.items() if arrivals.is_idle(now)]:
            del self._arrivals[model]
        for ticket in list(self._sent.values()):
            self._check_sent(ticket, now, connected_since)
        for model, queue in list(self._queues.items()):
            for ticket in [t for t in queue.waiting.values() if now >= t.queue_deadline]:
                self._leave(ticket, now)
                self._effects.fail(ticket, queue.timeout_error(ticket, now))
            self._pump(model, now)
            if queue.waiting and (queue.published_at is None or now - queue.published_at >= DEMAND_INTERVAL_S):
                self._publish_demand(model, queue, now)

    def _check_sent(self, ticket: Ticket, now: float, connected_since: float | None) -> None:
        route = self.routes.get(ticket.instance_id or "")
        if now >= ticket.sent_at + ticket.response_timeout_s - ticket.elapsed_s:
            seconds = f"{ticket.response_timeout_s:g} s"
            self.on_abort(ticket, DeadlineExceeded(f"The response of {ticket.model} was not complete after {seconds}"), now)
        elif connected_since is None:
            return  # silence proves nothing (rule 8)
        elif is_missing(ticket, now):
            self._effects.cancel(ticket)  # in case the request arrives there late
            self._on_loss(ticket, now)
        elif is_instance_gone(
            ticket, route, now, is_node_known=self.routes.is_node_known(ticket.node), connected_since=connected_since
        ):
            self._on_loss(ticket, now, has_died=route is None or has_crashed(route.status))
        elif needs_probe(ticket, now):
            ticket.probed_at = now
            self._effects.probe(ticket)

    # Consequences.

    def _pump(self, model: str, now: float) -> None:
        """Send waiting requests while instances accept them."""
        queue = self._queues.get(model)
        if queue is None:
            return
        self._pump_in_order(model, queue, now)
        if queue.waiting:
            self._pump_below_share(model, queue, now)
        if not queue.waiting:
            self._drop_queue(model, queue, now)

    def _pump_in_order(self, model: str, queue: ModelQueue, now: float) -> None:
        if self.routes.choose(model, now) is None:
            return
        for ticket in list(queue.waiting.values()):
            if is_suspect(ticket) and any(t.model == model and is_suspect(t) for t in self._sent.values()):
                continue
            route = self.routes.choose_for(ticket, now)
            if route is not None:
                queue.serve(ticket)
                self._send(ticket, route, now)
            elif not ticket.excluded_instances:
                return

    def _pump_below_share(self, model: str, queue: ModelQueue, now: float) -> None:
        """Send requests of keys that have less than their share at the instances (rule 2)."""
        in_flight, waiting = self._count_by_key(model), queue.keys()
        weights = {key: self._weights[key] for key in in_flight.keys() | waiting}
        limit, has_others = self.routes.slots(model, now)
        if has_others:
            weights[_OTHER_GATEWAYS] = 1.0
        if not limit or len(weights) < 2:
            return
        below = {key for key in waiting if is_below_share(key, in_flight, weights, limit)}
        for ticket in list(queue.waiting.values()) if below else ():
            if ticket.key not in below or is_suspect(ticket):
                continue
            route = self.routes.choose_for(ticket, now, is_below_share=True)
            if route is None:
                below.discard(ticket.key)
            else:
                queue.serve(ticket, is_in_order=False)
                self._send(ticket, route, now)
                in_flight[ticket.key] += 1
                if not is_below_share(ticket.key, in_flight, weights, limit):
                    below.discard(ticket.key)
            if not below:
                return

    def _add_sent(self, ticket: Ticket) -> None:
        self._sent[ticket.id] = ticket
        self._weights[ticket.key] = ticket.weight
        self._in_flight.setdefault(ticket.model, Counter())[ticket.priority, ticket.key] += 1

    def _send(self, ticket: Ticket, route: Route, now: float) -> None:
        ticket.stage = Stage.SENT
        ticket.instance_id = route.status.instance_id
        ticket.attempts += 1
        ticket.attempt_id = f"{ticket.id}-{ticket.attempts}"
        ticket.sent_at, ticket.last_message_at, ticket.is_admitted = now, 0.0, False
        ticket.node = route.node
        self.routes.acquire(route.status.instance_id)
        self._add_sent(ticket)
        self._effects.send(ticket, route)

    def _requeue(self, ticket: Ticket, now: float) -> None:
        ticket.queue_deadline += max(0.0, now - ticket.sent_at)  # meanwhile it had an instance
        self._release(ticket, now)
        ticket.stage, ticket.instance_id = Stage.QUEUED, None
        if ticket.is_resumable:
            ticket.queue_deadline = max(ticket.queue_deadline, now + ticket.queue_timeout_s)
        queue = self._queues.setdefault(ticket.model, ModelQueue())
        queue.reinsert(ticket)
        self._pump(ticket.model, now)
        if ticket.stage is Stage.QUEUED:
            self._effects.on_requeued(ticket)
            if len(queue.waiting) == 1:
                self._publish_demand(ticket.model, queue, now)

    def _on_loss(self, ticket: Ticket, now: float, error: ThawError | None = None, *, has_died: bool = False) -> None:
        """The request lost its instance: requeue it, or fail it (rule 5).

        Args:
            error: The error that the instance's host reported; None: no error.
        """
        count_loss(ticket, is_reported=error is not None, has_died=has_died)
        poison = is_poison(ticket, is_shared=self.routes.is_shared(ticket.instance_id or ""))
        if may_retry(ticket) and not poison and not ticket.is_committed:
            self._requeue(ticket, now)
            return
        route = self.routes.get(ticket.instance_id or "")
        self._leave(ticket, now)
        if error is None:
            reported = route.status.error if route is not None else None
            reason = reported.message if reported is not None else "its engine is gone"
            error = EngineFailed(f"{ticket.model} stopped before its response was complete: {reason}")
        if poison:
            reason = f"{ticket.engine_deaths} engines in a row died while they served this request, which may be why"
            error = EngineFailed(f"{error.message} ({reason})", should_retry=False)
        self._effects.fail(ticket, error)

    def _leave(self, ticket: Ticket, now: float) -> None:
        """Remove the request from its queue or instance; no-op if it has left already."""
        if ticket.stage is Stage.SENT:
            self._release(ticket, now)
            ticket.stage = Stage.DONE
            self._pump(ticket.model, now)
        elif ticket.stage is Stage.QUEUED:
            ticket.stage = Stage.DONE
            queue = self._queues.get(ticket.model)
            if queue is not None and queue.withdraw(ticket) and not queue.waiting:
                self._drop_queue(ticket.model, queue, now)

    def _release(self, ticket: Ticket, now: float) -> None:
        ticket.elapsed_s = ticket.elapsed_s + now - ticket.sent_at if ticket.is_resumable else 0.0
        del self._sent[ticket.id]
        in_flight, flow = self._in_flight[ticket.model], (ticket.priority, ticket.key)
        in_flight[flow] -= 1
        if not in_flight[flow]:
            del in_flight[flow]
        if not in_flight:
            del self._in_flight[ticket.model]
        self.routes.release(ticket.instance_id or "")

    def _fail_waiting(self, model: str, error: ThawError, now: float) -> None:
        queue = self._queues.get(model)
        for ticket in list(queue.waiting.values()) if queue is not None else ():
            self._leave(ticket, now)
            self._effects.fail(ticket, error)

    def _fail(self, ticket: Ticket, error: ThawError) -> None:
        ticket.stage = Stage.DONE
        self._effects.fail(ticket, error)

    def _drop_queue(self, model: str, queue: ModelQueue, now: float) -> None:
        del self._queues[model]
        if queue.published_at is not None:
            self._publish_demand(model, queue, now)

    def _publish_demand(self, model: str, queue: ModelQueue, now: float) -> None:
        queue.published_at = now
        arrivals = self._arrivals.get(model)
        in_flight = {
            (priority, key): (count, self._weights[key]) for (priority, key), count in self._in_flight.get(model, Counter()).items()
        }
        self._effects.publish_demand(queue.demand(self._gateway_id, model, in_flight, arrivals, now))
