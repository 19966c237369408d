"""Pipeline groups that the scheduler chose, in any order of events, with failures."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from services.scheduler.domain.effects import OrderMigration, SendStop
from services.scheduler.domain.events import AddModelsRequested, MigrationUpdated
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.entities import CONSOLIDATION
from shared.contracts.base import ErrorBody
from shared.contracts.loader import LinkStatus
from shared.contracts.model_info import LayerSizes
from shared.contracts.models import ModelSpec, Slo
from shared.contracts.node import InstanceState
from tests.support.examples import examples
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.group_machine import FAR, GROUPS, NAMES, NODES, Groups, add_far_model
from tests.unit.scheduler.world import World

READY = InstanceState.READY
ENDS = ("done", "done", "failed", "given_up")


class ConsolidatedGroups(Groups):
    """As `Groups`, but no model has `stages`: those of `GROUPS` are remote, with an objective."""

    @initialize()
    def begin(self) -> None:
        self.w = World(policy=Policy(preempt_after_s=5.0, starve_after_s=20.0))
        for node, budget in (("n1", 1100), ("n2", 1100), ("n3", 700), ("n4", 1100)):
            self.w.node(node, budget * MIB)
        self.loaders_report()
        for n in NAMES:
            if n in GROUPS:
                add_remote(self.w, n)
            elif n == FAR:
                add_far_model(self.w, n, keep_alive=20, replicas={"min": 0, "max": 2})
            else:
                self.w.model(n, keep_alive=20)

    def loaders_report(self) -> None:
        for node in NODES:
            link = LinkStatus(link="remote:far", bytes_per_second=20.0 * MIB)
            self.w.loader(node, (), bytes_per_second=1e9, links=(link,))

    @precondition(lambda self: not self.silent)
    @rule()
    def another_leader(self) -> None:
        super().another_leader()
        self.loaders_report()

    @rule(model=st.sampled_from((*sorted(GROUPS), FAR)), active=st.integers(0, 1))
    def group_serves(self, model: str, active: int) -> None:
        """Start a group, and let it serve until it may be consolidated."""
        self.demand(model, 1)
        self.w.get_ready(model)
        self.demand(model, 0)
        self.serve(model, active)
        self.pass_time(3.0)

    @rule()
    def all_starts_succeed(self) -> None:
        for node in NODES:
            self.starts_succeed(node)
        self.pass_time(0.25)

    @rule(state=st.sampled_from(ENDS))
    def migrations_end(self, state: str) -> None:
        for move in list(self.w.state.migrations.values()):
            if move.record is None or move.record.over:
                continue
            if state == "done":
                self.move_requests(move.record.source_instance, move.record.instance_id)
            error = ErrorBody(code="unreachable", message="gone") if state == "failed" else None
            self.w.send(MigrationUpdated(self.w.now, move.record.model_copy(update={"state": state, "error": error})))

    def move_requests(self, source: str, destination: str) -> None:
        by_id = {i: r for agent in self.w.agents.values() for i, r in agent.instances.items()}
        if (a := by_id.get(source)) is not None and (b := by_id.get(destination)) is not None:
            b.active, a.active, a.idle_since = b.active + a.active, 0, self.w.now

    @invariant()
    def group_stops_for_another_instance_only_if_that_serves(self) -> None:
        state = self.w.state
        for decision in self.w.decisions:
            for e in decision.effects:
                if not isinstance(e, SendStop) or not e.command.reason.endswith("serves instead"):
                    continue
                stopped = state.instances.get(e.command.instance_id)
                name = e.command.reason.split()[0]
                successor = decision.overlay.instances.get(name)
                assert successor is not None
                assert successor.state is READY
                assert successor.leaving == "no"
                assert stopped is None or stopped.model == successor.model

    @invariant()
    def consolidation_never_retires_both(self) -> None:
        state = self.w.state
        for move in state.migrations.values():
            if move.reason != CONSOLIDATION:
                continue
            source, destination = state.instances.get(move.source), state.instances.get(move.destination)
            assert state.models[move.model].card.spec.stages == 1
            if destination is not None:
                assert destination.stages == 1
            if source is not None and destination is not None and move.record is None:
                reasons = (source.leave_reason, destination.leave_reason)
                assert not any("instead" in r or "moved to" in r for r in reasons)

    @invariant()
    def migrations_are_ordered_between_instances_that_serve(self) -> None:
        for decision in self.w.decisions:
            for e in decision.effects:
                if isinstance(e, OrderMigration) and e.record.reason == CONSOLIDATION:
                    assert decision.overlay.instances[e.record.instance_id].state is READY


def add_remote(w: World, name: str) -> None:
    """Register a model that gets a group of two or three nodes at a cold start."""
    spec = ModelSpec(
        name=name, source=f"http://far/{name}", max_concurrency=1, keep_alive=20, slo=Slo(ttft=6.0 if GROUPS[name] == 2 else 3.6)
    )
    layers = LayerSizes(count=12, embedding_bytes=MIB, layer_bytes=13 * MIB, head_bytes=MIB)
    info = model_info(spec.source, 158 * MIB).model_copy(update={"layers": layers})
    answer = w.admin(AddModelsRequested(w.now, f"add {name}", (spec,), {name: info}, False))
    assert not isinstance(answer, ErrorBody), answer


TestConsolidatedGroups = ConsolidatedGroups.TestCase
TestConsolidatedGroups.settings = settings(
    max_examples=examples(40),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
