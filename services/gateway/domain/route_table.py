"""The route table: live instances, and the choice among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.gateway.domain.ticket import Ticket
from shared.contracts.demand import OVERCOMMIT
from shared.contracts.node import NODE_LOST_AFTER_S, InstanceState, InstanceStatus, NodeStatus
from shared.contracts.phases import PhaseSpan

SHARE_OVERCOMMIT = 4
"""OVERCOMMIT for requests of keys that are below their share."""
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 4.0


@dataclass(slots=True)
class Route:
    """One live instance.

    Attributes:
        own: Requests of this gateway that the instance has.
        others: Requests of other gateways, as of the last status.
        ready_since: Time at which the instance was first reported ready, or to take requests while
            it loads; None: it is neither.
        start_phases: Phases of its start until then.
        is_early: `ready_since` is when it began to take requests; it has not been ready.
        idle_since: Since when its engine reports no request; None: it has some.
        backoff_until: No request is sent to it before.
        refusals: Refusals in a row.
    """

    status: InstanceStatus
    node: str
    own: int = 0
    others: int = 0
    ready_since: float | None = None
    start_phases: tuple[PhaseSpan, ...] = ()
    is_early: bool = False
    idle_since: float | None = None
    backoff_until: float = 0.0
    refusals: int = 0

    @property
    def limit(self) -> int:
        return max(1, self.status.capacity) * OVERCOMMIT

    @property
    def is_ready(self) -> bool:
        return self.status.state is InstanceState.READY

    @property
    def accepts_early(self) -> bool:
        """True if it takes requests while its weights are loading."""
        return self.status.state is InstanceState.LOADING and self.status.accepts_requests

    def accepts(self, now: float, *, is_below_share: bool = False) -> bool:
        """True if a request may be sent now.

        One request of this gateway is always allowed: the engine queues it fairly.

        Args:
            is_below_share: The instances have less than the share of the request's key.
        """
        if not (self.is_ready or self.accepts_early) or now < self.backoff_until:
            return False
        limit = max(1, self.status.capacity) * SHARE_OVERCOMMIT if is_below_share else self.limit
        return self.own == 0 or self.own + self.others < limit


@dataclass(slots=True)
class _Node:
    boot_id: str
    seq: int
    last_status_at: float
    device_ids: tuple[str, ...] = ()
    instances: dict[str, Route] = field(default_factory=dict)


class RouteTable:
    """Instances of all nodes that reported recently.

    It is a cache of what nodeagents broadcast.

    Attributes:
        is_connected: The gateway's own connection to NATS works; without it no instance is chosen.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self._nodes: dict[str, _Node] = {}
        self._by_id: dict[str, Route] = {}
        self._by_model: dict[str, dict[str, Route]] = {}
        self._own: Counter[str] = Counter()
        self._shared: set[str] = set()

    def on_status(self, status: NodeStatus, now: float, changed: frozenset[str] | None = None) -> frozenset[str]:
        """Apply a node's status; one that was overtaken by a newer one is dropped.

        Args:
            status: The whole status.
            now: Monotonic seconds.
            changed: The instances that differ from the last status; None: any may.

        Returns:
            The models whose routes may have changed.
        """
        node = self._nodes.get(status.node)
        if node is not None and node.boot_id == status.boot_id and status.seq < node.seq:
            return frozenset()
        before = node.instances if node is not None else {}
        known = changed if node is not None else None
        merged = {
            i.instance_id: self._merge(before.get(i.instance_id), i, status.node, now)
            for i in status.instances
            if not i.is_later_stage and (known is None or i.instance_id in known)
        }
        after = merged if known is None else before | merged
        self._nodes[status.node] = _Node(status.boot_id, status.seq, now, tuple(d.device_id for d in status.devices), after)
        gone = [before[key] for key in before.keys() - after.keys()]
        for route in gone:
            self._remove(route)
        for route in merged.values():
            self._by_id[route.status.instance_id] = route
            self._by_model.setdefault(route.status.model, {})[route.status.instance_id] = route
        return frozenset(r.status.model for r in (*gone, *merged.values()))

    def _remove(self, route: Route) -> None:
        self._by_id.pop(route.status.instance_id, None)
        siblings = self._by_model.get(route.status.model, {})
        siblings.pop(route.status.instance_id, None)
        if not siblings:
            self._by_model.pop(route.status.model, None)

    def _merge(self, old: Route | None, status: InstanceStatus, node: str, now: float) -> Route:
        route = old or Route(status, node, own=self._own[status.instance_id])
        route.status = status
        busy = status.load.active + status.load.waiting
        route.others = max(0, busy - route.own)
        route.idle_since = None if busy else (route.idle_since or now)
        if route.is_ready or route.accepts_early:
            if route.ready_since is None or (route.is_ready and route.is_early):
                route.ready_since, route.start_phases, route.is_early = now, status.phases, not route.is_ready
        elif status.state is not InstanceState.DRAINING:
            route.ready_since = None
        return route

    def on_tick(self, now: float, connected_since: float | None = -math.inf) -> None:
        """Remove nodes whose status is overdue.

        Their silence proves nothing while the gateway's own connection does not work, nor until
        their next statuses are overdue too.

        Args:
            now: Monotonic seconds.
            connected_since: Time since which the connection to NATS works; None: it does not.
        """
        self.is_connected = connected_since is not None
        if connected_since is None or now - connected_since <= NODE_LOST_AFTER_S:
            return
        for name in self._find_silent(now):
            for route in self._nodes.pop(name).instances.values():
                self._remove(route)

    def has_silent_node(self, now: float) -> bool:
        """True if the status of a node is overdue."""
        return bool(self._find_silent(now))

    def _find_silent(self, now: float) -> list[str]:
        return [name for name, node in self._nodes.items() if now - node.last_status_at > NODE_LOST_AFTER_S]

    def get(self, instance_id: str) -> Route | None:
        return self._by_id.get(instance_id)

    def is_node_known(self, node: str) -> bool:
        return node in self._nodes

    def nodes(self) -> list[str]:
        return sorted(self._nodes)

    def acquire(self, instance_id: str) -> None:
        """Count a request of this gateway, also while the instance's node is silent."""
        self._own[instance_id] += 1
        self._sync(instance_id)
        route = self._by_id.get(instance_id)
        if self._own[instance_id] > 1 or route is None or route.others:
            self._shared.add(instance_id)

    def release(self, instance_id: str) -> None:
        self._own[instance_id] -= 1
        self._sync(instance_id)
        if self._own[instance_id] <= 0:
            del self._own[instance_id]
            self._shared.discard(instance_id)

    def is_shared(self, instance_id: str) -> bool:
        """True if the instance has had several requests at once while it had ours."""
        return instance_id in self._shared

    def _sync(self, instance_id: str) -> None:
        route = self._by_id.get(instance_id)
        if route is not None:
            route.own = self._own[instance_id]

    def iter_routes(self, model: str) -> Iterator[Route]:
        return iter(self._by_model.get(model, {}).values())

    def iter_all(self) -> Iterator[Route]:
        return iter(self._by_id.values())

    def longest_idle_s(self, now: float) -> float:
        """Return how long all instances of the device that is idle for longest have been idle.

        Infinity for a device without an instance; 0 if no device is known.
        """
        longest = 0.0
        for node in self._nodes.values():
            for device in node.device_ids:
                since = [r.idle_since for r in node.instances.values() if device in r.status.device_ids]
                idle_s = min((0.0 if at is None else now - at for at in since), default=math.inf)
                longest = max(longest, idle_s)
        return longest

    def choose(self, model: str, now: float) -> Route | None:
        """Return the least-loaded instance that accepts requests; the lowest id of equals."""
        return self._least_loaded(self._accepting(model, now))

    def choose_for(self, ticket: Ticket, now: float, *, is_below_share: bool = False) -> Route | None:
        """Like `choose`, for a request that may need or avoid certain instances.

        The ticket may prefer an instance, exclude instances, or need a revision of the weights.
        """
        accepting = self._accepting(ticket.model, now, is_below_share=is_below_share)
        routes = [r for r in accepting if r.status.instance_id not in ticket.excluded_instances]
        if ticket.is_resumable:
            routes = [r for r in routes if r.status.revision == ticket.revision] or routes
        preferred = [r for r in routes if r.status.instance_id == ticket.preferred_instance]
        return self._least_loaded(preferred or routes)

    def slots(self, model: str, now: float) -> tuple[int, bool]:
        """Return the requests that the model's instances take at once, and whether other gateways
        have some there.
        """
        routes = self._accepting(model, now, is_below_share=True)
        return sum(r.limit for r in routes), any(r.others for r in routes)

    def _accepting(self, model: str, now: float, *, is_below_share: bool = False) -> list[Route]:
        """Return the instances that accept requests; loading ones only if none is ready."""
        if not self.is_connected:
            return []
        routes = list(self.iter_routes(model))
        has_ready = any(r.is_ready for r in routes)
        return [r for r in routes if r.accepts(now, is_below_share=is_below_share) and (r.is_ready or not has_ready)]

    def _least_loaded(self, routes: list[Route]) -> Route | None:
        return min(routes, key=lambda r: ((r.own + r.others) / r.limit, r.status.instance_id), default=None)

    def back_off(self, instance_id: str, now: float) -> None:
        """Send the instance nothing for a while, which doubles with each refusal in a row.

        Refusals during that while are of requests that were sent before it: they change nothing.
        """
        route = self._by_id.get(instance_id)
        if route is not None and now >= route.backoff_until:
            route.backoff_until = now + min(FIRST_BACKOFF_S * 2**route.refusals, MAX_BACKOFF_S)
            route.refusals = min(route.refusals + 1, 8)

    def reset_backoff(self, instance_id: str) -> None:
        route = self._by_id.get(instance_id)
        if route is not None:
            route.refusals = 0

    def most_advanced_start(self, model: str) -> InstanceStatus | None:
        """Return the start of an instance that has progressed furthest."""
        starting = [r.status for r in self.iter_routes(model) if r.status.state.starting]
        return max(starting, key=lambda s: s.progress, default=None)
