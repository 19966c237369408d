"""Rules that the scheduler's state machines share: nodes report, fail and are drained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.world import World

READY, LOADING, DRAINING = InstanceState.READY, InstanceState.LOADING, InstanceState.DRAINING
ACTIONS = ("cordon", "uncordon", "drain")


class SchedulerMachine(RuleBasedStateMachine):
    """A cluster with random events.

    A subclass adds nodes and models, demand, the passing of time, and invariants. It makes rules of
    the methods without a decorator by `nodes`, the names of its nodes.
    """

    nodes: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, nodes: tuple[str, ...] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        if nodes:
            cls.nodes = nodes
            node = st.sampled_from(nodes)
            for method in ("starts_succeed", "stops_finish", "say", "fall_silent", "return_"):
                setattr(cls, method, rule(n=node)(getattr(SchedulerMachine, method)))
            cls.change_node = rule(n=node, action=st.sampled_from(ACTIONS))(SchedulerMachine.change_node)  # type: ignore[method-assign]

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.w = World(policy=policy)
        self.silent: set[str] = set()
        self.waiting: dict[str, int] = {}

    def speakers(self) -> tuple[str, ...]:
        return tuple(n for n in self.nodes if n not in self.silent)

    def serving(self, model: str) -> list[Running]:
        return self.w.of(model, READY, DRAINING)

    def repeat_demand(self) -> None:
        for model, waiting in self.waiting.items():
            if waiting:
                self.w.demand(model, waiting)

    def fail_starts(self, n: str, error: ErrorBody) -> None:
        for r in self.w.agents[n].instances.values():
            if r.state is LOADING:
                r.state, r.error = InstanceState.FAILED, error

    def settle(self, *, serves: bool) -> None:
        """Let every start succeed and every stop finish.

        Args:
            serves: Each ready instance has a request.
        """
        for agent in self.w.agents.values():
            for r in agent.instances.values():
                if r.state is LOADING:
                    r.state, r.idle_since = READY, self.w.now
                r.active = int(serves and r.state is READY)
            agent.finish_stops()

    def rebuild_indexes(self, tables: Iterable[Mapping[Any, Any]], indexes: Iterable[str]) -> ClusterState:
        """Return a state with the same tables, after a check of its bookings and indexes."""
        kept = self.w.state
        rebuilt = ClusterState(epoch=kept.epoch, keep_alive_rule=kept.keep_alive_rule)
        apply(rebuilt, [Put(e) for table in tables for e in table.values()])
        assert rebuilt.bookings == kept.bookings
        assert rebuilt.claimed == kept.claimed
        for index in indexes:
            had, have = getattr(rebuilt, index), getattr(kept, index)
            assert {k: set(v) for k, v in had.items()} == {k: set(v) for k, v in have.items()}, index
        return rebuilt

    def starts_succeed(self, n: str) -> None:
        for r in self.w.agents[n].instances.values():
            if r.state is LOADING:
                r.state, r.idle_since = READY, self.w.now

    def stops_finish(self, n: str) -> None:
        self.w.agents[n].finish_stops()

    def serve(self, model: str, active: int) -> None:
        for r in self.serving(model):
            if r.state is READY or active < r.active:
                r.completed += max(0, r.active - active)
                r.active, r.idle_since = active, self.w.now

    def say(self, n: str) -> None:
        if n not in self.silent:
            self.w.report(n)

    def fall_silent(self, n: str) -> None:
        self.silent.add(n)

    def return_(self, n: str) -> None:
        self.silent.discard(n)
        self.w.report(n)

    def change_node(self, n: str, action: str) -> None:
        self.w.change_node(n, action)
