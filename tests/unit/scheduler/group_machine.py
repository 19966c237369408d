"""Random events of groups on several nodes, and their invariants: a state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.effects import PublishLoadFailed, SendStart
from services.scheduler.domain.estimates.token_times import TOKEN
from services.scheduler.domain.events import AddModelsRequested
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.measurements import ANYWHERE, Estimate
from shared.contracts.base import ErrorBody
from shared.contracts.loader import LinkStatus
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec, Slo
from shared.errors import EngineFailed
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.fake_agents import Running
from tests.unit.scheduler.scheduler_machine import SchedulerMachine
from tests.unit.scheduler.staged_models import add_group
from tests.unit.scheduler.world import World

GROUPS = {"g2": 2, "h2": 2, "g3": 3}
FAR = "far"
"""A model that the scheduler divides, and whose groups need full workers."""
NAMES = (*GROUPS, FAR, "a", "b", "c")
NODES = ("n1", "n2", "n3", "n4")
name = st.sampled_from(NAMES)
node = st.sampled_from(NODES)


def add_far_model(w: World, name: str, **options: Any) -> None:
    """Register a remote model whose objectives need a group with full workers."""
    spec = ModelSpec(name=name, source=f"http://far/{name}", max_concurrency=1, slo=Slo(ttft=6.0, tpot=0.1), **options)
    layers = LayerSizes(count=12, embedding_bytes=MIB, layer_bytes=13 * MIB, head_bytes=MIB)
    info = model_info(spec.source, 158 * MIB).model_copy(update={"layers": layers, "model_type": "llama"})
    answer = w.admin(AddModelsRequested(w.now, f"add-{name}", (spec,), {name: info}, False))
    assert not isinstance(answer, ErrorBody), answer
    for n in NODES:
        w.loader(n, (), bytes_per_second=1e9, links=(LinkStatus(link="remote:far", bytes_per_second=20 * MIB),))
    apply(w.state, [Put(Estimate(name, ANYWHERE, {TOKEN: Parameter(55.0, 0.0, 5)}))])


class Groups(SchedulerMachine, nodes=NODES):
    """Four nodes with a device each, three of which have room for two stages or models."""

    def __init__(self) -> None:
        super().__init__(Policy(preempt_after_s=5.0, starve_after_s=20.0))

    @initialize()
    def begin(self) -> None:
        self.w.node("n1", 800 * MIB)
        self.w.node("n2", 800 * MIB)
        self.w.node("n3", 400 * MIB)
        self.w.node("n4", 800 * MIB)
        for n in NAMES:
            if n in GROUPS:
                add_group(self.w, n, GROUPS[n], keep_alive=20)
            elif n == FAR:
                add_far_model(self.w, n, keep_alive=20, replicas={"min": 0, "max": 2})
            else:
                self.w.model(n, keep_alive=20)

    def serving(self, model: str) -> list[Running]:
        return [r for r in super().serving(model) if r.group is None or r.group.index == 0]

    @rule(model=name, waiting=st.integers(0, 3))
    def demand(self, model: str, waiting: int) -> None:
        self.waiting[model] = waiting
        self.w.demand(model, waiting)

    @rule(model=name)
    def bring_up(self, model: str) -> None:
        """Meet demand: a model starts, serves, and is idle."""
        self.demand(model, 1)
        for _ in range(2):
            self.w.finish_stops()
        self.w.get_ready(model)
        self.demand(model, 0)
        self.serve(model, 1)
        self.serve(model, 0)
        self.pass_time(3.0)

    @rule()
    def burst(self) -> None:
        """Let more requests wait than two groups take."""
        self.demand(FAR, 5)

    @rule(seconds=st.sampled_from((0.25, 1.0, 3.0)))
    def pass_time(self, seconds: float) -> None:
        self.w.now += seconds
        if speakers := self.speakers():
            self.w.report(*speakers)
        self.w.tick(nodes_report=False)
        self.repeat_demand()

    @rule(seconds=st.sampled_from((1.0, 6.0, 20.0)))
    def leader_is_disconnected(self, seconds: float) -> None:
        """Commands wait, and nodes report once the leader is connected again."""
        alive = {p.node for p in self.w.state.presence.values() if p.alive}
        self.w.undelivered = []
        self.w.tick(seconds, nodes_report=False, connected_since=None)
        assert {p.node for p in self.w.state.presence.values() if p.alive} == alive
        self.w.deliver()
        if speakers := self.speakers():
            self.w.report(*speakers)
        self.repeat_demand()
        self.w.tick(nodes_report=False, connected_since=self.w.now)
        assert {p.node for p in self.w.state.presence.values() if p.alive} >= alive

    @rule(model=name, active=st.integers(0, 2))
    def serve(self, model: str, active: int) -> None:
        super().serve(model, active)

    @rule(n=node)
    def starts_fail(self, n: str) -> None:
        self.fail_starts(n, EngineFailed("it failed").body())

    @precondition(lambda self: not self.silent)
    @rule()
    def another_leader(self) -> None:
        """Change the leader, who has the estimates and the loaders' weights from the database."""
        old = self.w.state
        self.w.change_leader(*old.estimates.values(), *old.loaders.values())
        self.w.report()

    @invariant()
    def no_memory_is_promised_twice(self) -> None:
        state = self.w.state
        for n in NODES:
            if n not in state.nodes:
                continue
            stages = [s for s in state.later_stages.values() if s.node == n]
            there = [i for i in state.instances.values() if i.node == n]
            firsts = {s.stage_id: state.instances.get(s.first) for s in stages}
            staying = sum(i.reserve_bytes for i in there if i.leaving == "no")
            staying += sum(s.reserve_bytes for s in stages if (f := firsts[s.stage_id]) is not None and f.leaving == "no")
            b = booking_of(state, n, "cpu:0")
            assert staying <= b.budget_bytes
            assert b.held_bytes - b.leaving_bytes <= b.budget_bytes
            sent = sum(i.reserve_bytes for i in there if i.sent_at is not None)
            sent += sum(s.reserve_bytes for s in stages if s.sent_at is not None)
            assert sent <= b.held_bytes <= b.budget_bytes

    @invariant()
    def promises_of_full_workers_belong_to_groups(self) -> None:
        state = self.w.state
        for f in state.full_workers.values():
            group = state.instances.get(f.group)
            assert group is not None
            assert (group.model, group.leaving) == (f.model, "no")
            assert f.device in state.devices_of(group)
            whole = [i.instance_id for i in state.on_device(f.node, f.device_id) if i.model == f.model and i.stages == 1]
            assert f.used_by in whole if f.used_by is not None else not whole
        for b in state.bookings.values():
            there = [f.reserve_bytes for f in state.full_workers.values() if f.device == b.key and f.used_by is None]
            assert b.promised_bytes == sum(there) <= b.claimed_bytes
            assert b.held_bytes - b.leaving_bytes + b.promised_bytes <= b.budget_bytes

    @invariant()
    def stages_are_promised_and_started_together(self) -> None:
        state = self.w.state
        for i in state.instances.values():
            later = state.stages_behind(i.instance_id)
            if i.is_claim and later:
                assert len(later) == i.stages - 1, "a claim has the memory of every stage, or is given up"
            assert all((s.sent_at is None) == i.is_claim for s in later)
        for decision in self.w.decisions:
            started = [e for e in decision.effects if isinstance(e, SendStart) and e.place is not None]
            for e in started:
                assert e.place is not None
                assert sum(x.place is not None and x.place.first == e.place.first for x in started) == e.place.count
        self.w.decisions.clear()

    @invariant()
    def indexes_are_what_the_tables_say(self) -> None:
        kept = self.w.state
        tables = (
            kept.models,
            kept.nodes,
            kept.presence,
            kept.reports,
            kept.loaders,
            kept.later_stages,
            kept.instances,
            kept.full_workers,
        )
        self.rebuild_indexes(tables, ("stages_on", "stages_of", "promised_on"))

    def teardown(self) -> None:
        """From now on all nodes behave, and every request is served: no claim waits for ever."""
        w = self.w
        for n in NODES:
            w.change_node(n, "uncordon")
        wanted = {n for n, waiting in self.waiting.items() if waiting}
        served: set[str] = set()
        before = len(w.sent(PublishLoadFailed))
        for _ in range(160):
            w.now += 0.5
            self.settle(serves=False)
            w.tick()
            failed = {e.event.model for e in w.sent(PublishLoadFailed)[before:]}
            for n in sorted(wanted - served - failed):
                if w.demand(n, 1).outlook == "ready":
                    served.add(n)
                    w.demand(n, 0)
            if wanted <= served | failed:
                return
        raise AssertionError((wanted - served, w.state.unschedulable))
