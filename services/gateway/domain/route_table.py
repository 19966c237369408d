"""Where ready instances are: a cache of what the nodeagents broadcast, and the least-loaded choice among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.gateway.domain.ticket import Ticket
from shared.contracts.node import NODE_LOST_AFTER_S, InstanceState, InstanceStatus, NodeStatus
from shared.contracts.phases import PhaseSpan

OVERCOMMIT = 2
"""Requests sent to an instance at once, over all gateways, as a multiple of its capacity: its own queue never runs dry while a
finished sequence's news is under way, and what is beyond waits here, where it can still go to another replica."""
FIRST_COOLDOWN_S = 0.25
LONGEST_COOLDOWN_S = 4.0


@dataclass(slots=True)
class Route:
    """One live instance. `others` are the requests of other gateways, as of the last status; `idle_since`: its engine has said since then
    that it has nothing to do."""

    status: InstanceStatus
    node: str
    own: int = 0
    others: int = 0
    ready_since: float | None = None
    start_phases: tuple[PhaseSpan, ...] = ()
    idle_since: float | None = None
    refused_until: float = 0.0
    refusals: int = 0

    @property
    def limit(self) -> int:
        return max(1, self.status.capacity) * OVERCOMMIT

    def takes(self, now: float) -> bool:
        """Whether a request may be sent here now. One of our own is always allowed: the engine queues it fairly."""
        if self.status.state is not InstanceState.READY or now < self.refused_until:
            return False
        return self.own == 0 or self.own + self.others < self.limit


@dataclass(slots=True)
class _Node:
    boot_id: str
    seq: int
    heard: float
    instances: dict[str, Route] = field(default_factory=dict)


class Routes:
    """All nodes heard of lately."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._by_id: dict[str, Route] = {}
        self._own: Counter[str] = Counter()
        self._shared: set[str] = set()

    def on_status(self, status: NodeStatus, now: float) -> frozenset[str]:
        """Take over a node's status; the models whose routes may have changed. An overtaken message is dropped."""
        node = self._nodes.get(status.node)
        if node is not None and node.boot_id == status.boot_id and status.seq < node.seq:
            return frozenset()
        before = node.instances if node is not None else {}
        after = {i.instance_id: self._merge(before.get(i.instance_id), i, status.node, now) for i in status.instances}
        self._nodes[status.node] = _Node(status.boot_id, status.seq, now, after)
        for gone in before.keys() - after.keys():
            self._by_id.pop(gone, None)
        self._by_id.update(after)
        return frozenset(r.status.model for r in (*before.values(), *after.values()))

    def _merge(self, old: Route | None, status: InstanceStatus, node: str, now: float) -> Route:
        route = old or Route(status, node, own=self._own[status.instance_id])
        route.status = status
        busy = status.load.active + status.load.waiting
        route.others = max(0, busy - route.own)
        route.idle_since = None if busy else (route.idle_since or now)
        if status.state is InstanceState.READY:
            if route.ready_since is None:
                route.ready_since, route.start_phases = now, status.phases
        elif status.state is not InstanceState.DRAINING:
            route.ready_since = None
        return route

    def on_tick(self, now: float) -> None:
        """Forget nodes that have been silent too long."""
        for name in [n for n, node in self._nodes.items() if now - node.heard > NODE_LOST_AFTER_S]:
            for instance_id in self._nodes.pop(name).instances:
                self._by_id.pop(instance_id, None)

    def get(self, instance_id: str) -> Route | None:
        return self._by_id.get(instance_id)

    def node_known(self, node: str) -> bool:
        return node in self._nodes

    def nodes(self) -> list[str]:
        return sorted(self._nodes)

    def hold(self, instance_id: str) -> None:
        """Count a request of ours, also while the instance's node is silent."""
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

    def shared(self, instance_id: str) -> bool:
        """Whether it has had more than one request at a time since it last had none of ours."""
        return instance_id in self._shared

    def _sync(self, instance_id: str) -> None:
        route = self._by_id.get(instance_id)
        if route is not None:
            route.own = self._own[instance_id]

    def of(self, model: str) -> Iterator[Route]:
        return (r for r in self._by_id.values() if r.status.model == model)

    def all(self) -> Iterator[Route]:
        return iter(self._by_id.values())

    def choose(self, model: str, now: float) -> Route | None:
        """The ready instance with the most room; equal ones by id, so that the choice can be explained."""
        return self._least([r for r in self.of(model) if r.takes(now)])

    def choose_for(self, ticket: Ticket, now: float) -> Route | None:
        """The same for a request that may be particular: about the weights that are to go on with it, or because some instances refused."""
        ready = [r for r in self.of(ticket.model) if r.takes(now) and r.status.instance_id not in ticket.avoid]
        if ticket.resumes:
            ready = [r for r in ready if r.status.revision == ticket.revision] or ready
        preferred = [r for r in ready if r.status.instance_id == ticket.first]
        return self._least(preferred or ready)

    def _least(self, ready: list[Route]) -> Route | None:
        return min(ready, key=lambda r: ((r.own + r.others) / r.limit, r.status.instance_id), default=None)

    def refused(self, instance_id: str, now: float) -> None:
        """The instance would not take a request: leave it alone for a while that doubles with each refusal."""
        route = self._by_id.get(instance_id)
        if route is not None:
            route.refused_until = now + min(FIRST_COOLDOWN_S * 2**route.refusals, LONGEST_COOLDOWN_S)
            route.refusals = min(route.refusals + 1, 8)

    def accepted(self, instance_id: str) -> None:
        route = self._by_id.get(instance_id)
        if route is not None:
            route.refusals = 0

    def starting(self, model: str) -> InstanceStatus | None:
        """The start that has come furthest, for those who wait to see."""
        starting = [r.status for r in self.of(model) if r.status.state.starting]
        return max(starting, key=lambda s: s.progress, default=None)
