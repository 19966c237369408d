"""Random events of a cluster, and its invariants: a state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from services.scheduler.domain.busy import is_busy, is_node_lost_soon
from services.scheduler.domain.decide import decide
from services.scheduler.domain.effects import PublishLoadFailed, ReplyTo, SendStop
from services.scheduler.domain.events import Tick
from services.scheduler.domain.lifecycle.scale_down import stop_reason
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Waiter
from shared.contracts.node import Capability
from shared.errors import CheckpointInvalid, EngineFailed
from simulator.policies import PROFILES
from tests.support.fake_node import MIB
from tests.unit.scheduler.scheduler_machine import SchedulerMachine

NAMES = ("a", "b", "c", "pinned", "many")
NODES = ("n1", "n2")
name = st.sampled_from(NAMES)
node = st.sampled_from(NODES)
IDLE_S = 1.0
"""Between ticks of an idle scheduler."""
SETTLED_ROUNDS = 12
"""Rounds of half a second after every request was served, longer than the time until preemption."""


class Cluster(SchedulerMachine, nodes=NODES):
    """One node with room for two models, one for one; five models of 324 MiB each."""

    profile = "thaw"

    def __init__(self) -> None:
        super().__init__(Policy(profile=PROFILES[self.profile], preempt_after_s=5.0, starve_after_s=20.0))
        self.checked_stops = 0

    @initialize()
    def begin(self) -> None:
        self.w.node("n1", 700 * MIB)
        self.w.node("n2", 400 * MIB)
        for agent in self.w.agents.values():
            agent.capabilities, agent.snapshot_budget = (Capability(name="suspend:cpu", available=True),), 10_000 * MIB
        for n in NAMES:
            replicas = {"min": 0, "max": 2 if n == "many" else 1}
            # Its engine reads its weights itself: its start may wait on its node for a victim's
            # bytes.
            hosted: dict[str, Any] = {"engine": "vllm", "memory": 324 * MIB} if n == "c" else {}
            self.w.model(n, pin=n == "pinned", park=n in NAMES[:2], keep_alive=20, replicas=replicas, **hosted)

    @rule(
        model=name,
        waiting=st.integers(0, 30),
        in_flight=st.integers(0, 30),
        age=st.integers(0, 20_000),
        arrivals=st.integers(0, 90),
    )
    def demand(self, model: str, waiting: int, in_flight: int, age: int, arrivals: int = 0) -> None:
        self.waiting[model] = waiting
        self.w.demand(model, waiting, in_flight=in_flight, oldest_wait_ms=age, window=arrivals // 2, peak=arrivals)

    @rule(model=name, others_serve=st.booleans())
    def bring_up(self, model: str, others_serve: bool) -> None:
        """Meet demand: a model starts, serves, and is idle."""
        for n in NAMES:
            self.serve(n, int(others_serve))
        self.demand(model, 1, 0, 0)
        for n in NODES:
            self.stops_finish(n)
            self.say(n)
            self.starts_succeed(n)
            self.say(n)
        self.demand(model, 0, 0, 0)
        self.serve(model, 1)
        self.serve(model, 0)
        self.pass_time(3.0)

    @rule(seconds=st.sampled_from((0.1, 0.25, 1.0, 3.0, 20.0)))
    def pass_time(self, seconds: float) -> None:
        step = min(seconds, 1.0)
        for _ in range(round(seconds / step)):
            self.w.now += step
            self.w.report(*self.speakers()) if self.speakers() else None
            self.w.tick(nodes_report=False)
            self.repeat_demand()

    @rule(model=name, active=st.integers(0, 3))
    def serve(self, model: str, active: int) -> None:
        super().serve(model, active)

    @rule(n=node, bad=st.booleans())
    def starts_fail(self, n: str, bad: bool) -> None:
        self.fail_starts(n, (CheckpointInvalid if bad else EngineFailed)("it failed").body())

    @rule(n=node)
    def reboot(self, n: str) -> None:
        """Reboot the whole node: its engines are gone too."""
        agent = self.w.agents[n]
        agent.instances.clear()
        agent.boot, agent.seq, agent.highest = f"{agent.boot}+", 0, 0

    @rule(model=name)
    def wake(self, model: str) -> None:
        self.w.wake(model)

    @rule(model=name)
    def sleep(self, model: str) -> None:
        self.w.sleep(model)

    @precondition(lambda self: not self.silent)
    @rule()
    def another_leader(self) -> None:
        self.w.change_leader()

    @invariant()
    def nothing_is_booked_twice(self) -> None:
        for n in NODES:
            if n in self.w.state.nodes:
                booked = booking_of(self.w.state, n, "cpu:0")
                there = [i for i in self.w.state.instances.values() if i.node == n]
                sent = sum(i.reserve_bytes for i in there if i.sent_at is not None)
                staying = sum(i.reserve_bytes for i in there if i.leaving == "no")
                assert sent <= booked.held_bytes
                assert booked.held_bytes - booked.leaving_bytes <= booked.budget_bytes, (
                    "only for bytes that are leaving does anything wait there"
                )
                assert staying <= booked.budget_bytes, "more is claimed than will be free"

    @invariant()
    def indexes_are_what_the_tables_say(self) -> None:
        kept = self.w.state
        tables = (kept.models, kept.nodes, kept.presence, kept.loaders, kept.reports, kept.estimates, kept.instances)
        rebuilt = self.rebuild_indexes(tables, ("by_model", "by_node", "by_device", "in_memory", "on_disk", "measured_on"))
        assert (rebuilt.aliases, rebuilt.kept_running, rebuilt.deadlines) == (kept.aliases, kept.kept_running, kept.deadlines)

    @invariant()
    def every_instance_that_time_evicts_is_due_by_then(self) -> None:
        for later in (0.0, 5.0, 1000.0):
            tx = Transaction(self.w.state, self.w.now + later, self.w.policy)
            leaving = {i.instance_id for i in self.w.state.instances.values() if i.leaving == "no" and stop_reason(tx, i)}
            assert leaving <= {i.instance_id for i in tx.due_instances()}

    @invariant()
    def between_rare_ticks_time_changes_nothing(self) -> None:
        w = self.w
        if not (is_busy(w.state, w.now, w.policy, IDLE_S) or is_node_lost_soon(w.state, w.now, w.policy, IDLE_S)):
            for later in (w.now + 0.25, w.now + 0.75):
                decision = decide(w.state, Tick(later), later, w.policy)
                assert not decision.changes
                assert not decision.effects

    @invariant()
    def pinned_instances_are_not_evicted(self) -> None:
        stops = self.w.sent(SendStop)
        for stop in stops[self.checked_stops :]:
            command = stop.command
            if command.reason.startswith("makes room"):
                running = self.w.agents[stop.node].instances.get(command.instance_id)
                assert running is None or running.command.card.name != "pinned"
        self.checked_stops = len(stops)

    @invariant()
    def never_more_than_asked_for(self) -> None:
        """No more instances run than were requested.

        During migrations, each source may have one more, the destination. So may each instance
        that was to stop if idle and is busy: its replacement starts before its node refuses.
        """
        left = {move.source for move in self.w.state.migrations.values()} | self.w.refused
        for model in self.w.state.models.values():
            live = self.w.state.live_instances(model)
            assert sum(i.instance_id not in left for i in live) <= model.card.spec.replicas.max
            assert len({i.instance_id for i in live}) == len(live)

    def teardown(self) -> None:
        """From now on all nodes behave, and every request is served.

        Ready instances serve without a pause until they are drained.
        """
        w = self.w
        for n in NODES:
            w.change_node(n, "uncordon")
        wanted = {n for n, waiting in self.waiting.items() if waiting}
        served: set[str] = set()
        before = len(w.sent(PublishLoadFailed))

        def unanswered() -> set[str]:
            return wanted - served - {e.event.model for e in w.sent(PublishLoadFailed)[before:]}

        def waiting_wakes() -> list[Waiter]:
            return [x for x in w.state.waiters.values() if x.kind == "wake"]

        for n in NAMES:
            self.waiting[n] = 1 if n in wanted else 0
            w.demand(n, self.waiting[n])
        rounds, settled = 0, 0
        while rounds < 160 and settled < SETTLED_ROUNDS:
            rounds, settled = rounds + 1, 0 if unanswered() or waiting_wakes() else settled + 1
            w.now += 0.5
            self.settle(serves=True)
            w.tick()
            for n in wanted - served:
                if w.demand(n, 1).outlook == "ready":
                    served.add(n)
                    w.demand(n, 0)
        assert not unanswered(), (unanswered(), w.state.unschedulable)
        assert not waiting_wakes(), waiting_wakes()
        answers = [e.waiter for e in w.sent(ReplyTo)]
        assert len(answers) == len(set(answers)), "one answer each"
