"""The scheduler's domain without I/O, with recorded effects and fake nodeagents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from services.scheduler.domain.decide import Decision, decide
from services.scheduler.domain.effects import Effect, ReplyTo, SendResume, SendStart, SendStop, SendSuspend
from services.scheduler.domain.events import (
    AddModelsRequested,
    ChangeNodeRequested,
    CommandAccepted,
    DemandReceived,
    Event,
    LoaderStatusReceived,
    MigrationUpdated,
    NodeStatusReceived,
    Recovered,
    RemoveModelRequested,
    SleepRequested,
    StartRefused,
    StopRefused,
    Tick,
    WakeRequested,
)
from services.scheduler.domain.lifecycle.deliveries import is_current
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.changes import KINDS, Put, apply, table
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Entity
from services.scheduler.domain.state.transaction import TOKENS_PER_EPOCH
from shared.contracts.base import ErrorBody
from shared.contracts.demand import Demand
from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState, Suspension
from shared.unit_charges import units_by_device
from tests.support.fake_node import MIB, model_info
from tests.unit.scheduler.fake_agents import Agent, Running

E = TypeVar("E", bound=Effect)


@dataclass
class World:
    """The scheduler's world at time `now`; `send` decides one event.

    Commands reach the agents at once, unless `undelivered` is a list.
    """

    policy: Policy = field(default_factory=Policy)
    epoch: int = 1
    now: float = 1000.0
    agents: dict[str, Agent] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Instances that a node refused to stop or suspend."""
    undelivered: list[Effect] | None = None
    """If a list: effects are kept here until `deliver`, as while a node does not answer."""

    def __post_init__(self) -> None:
        self.state = ClusterState(epoch=self.epoch, recovered_at=self.now - 100, keep_alive_rule=self.policy.profile.keep)
        self._asked = 0
        self._answers: list[Event] = []
        """Answers of nodes to the commands of a decision: they arrive once all are sent."""

    def send(self, event: Event) -> Decision:
        before = self.state.fork()
        decision = decide(self.state, event, self.now, self.policy)
        assert self.state == before, "decide must not change the state"
        again = decide(before, event, self.now, self.policy)
        assert (again.changes, again.effects, again.plans) == (decision.changes, decision.effects, decision.plans), "the same again"
        self.state.absorb(decision.overlay)
        apply(before, decision.changes)
        assert all(table(self.state, kind) == table(before, kind) for kind in KINDS), "taken over and applied are the same"
        self.decisions.append(decision)
        self.effects += decision.effects
        for effect in decision.effects:
            if self.undelivered is None:
                self._deliver(effect)
            else:
                self.undelivered.append(effect)
        while self._answers:
            self.send(self._answers.pop(0))
        return decision

    def deliver(self) -> None:
        """Deliver what was kept, as the outbox does: starts that were given up are left out."""
        kept, self.undelivered = self.undelivered or [], None
        for effect in kept:
            if not isinstance(effect, SendStart | SendResume) or is_current(self.state, effect.command):
                self._deliver(effect)
        while self._answers:
            self.send(self._answers.pop(0))

    def _deliver(self, effect: Effect) -> None:
        if not isinstance(effect, SendStart | SendStop | SendSuspend | SendResume):
            return
        token = effect.command.token
        assert token // TOKENS_PER_EPOCH == self.state.epoch
        assert not self.tokens or token > self.tokens[-1], "tokens must grow"
        self.tokens.append(token)
        agent = self.agents.get(effect.node)
        if agent is None:
            return
        if isinstance(effect, SendSuspend):
            if (refused := agent.suspend(effect)) is not None:
                self._refuse_stop(effect.command.instance_id, refused)
            return
        if isinstance(effect, SendStart | SendResume):
            error = (
                agent.start(effect.command, self.now, effect.place)
                if isinstance(effect, SendStart)
                else agent.resume(effect, self.now)
            )
            again: Event = (
                StartRefused(self.now, effect.command.instance_id, error)
                if error
                else CommandAccepted(self.now, effect.command.instance_id)
            )
            self._answers.append(again)
        elif (error := agent.stop(effect)) is not None:
            self._refuse_stop(effect.command.instance_id, error)

    def _refuse_stop(self, instance_id: str, error: ErrorBody) -> None:
        self.refused.add(instance_id)
        self._answers.append(StopRefused(self.now, instance_id, error))

    # Actions of tests.

    def change_leader(self, *also: Entity) -> None:
        """Change the leader: only durable state survives, and the epoch is one higher.

        Ordered migrations are in their bucket.

        Args:
            also: Entities that the database has besides models, nodes, instances and plans.
        """
        old = self.state
        state = ClusterState(epoch=old.epoch + 1, recovered_at=self.now, keep_alive_rule=old.keep_alive_rule)
        kept: list[Entity] = [*old.models.values(), *old.nodes.values(), *old.instances.values(), *old.plans.values(), *also]
        apply(state, [Put(e) for e in kept])
        self.state = state
        self.send(Recovered(self.now))
        for move in old.migrations.values():
            if move.record is not None:
                self.send(MigrationUpdated(self.now, move.record))

    def node(self, name: str = "n1", budget: int = 1000 * MIB, devices: tuple[str, ...] = ("cpu:0",)) -> Agent:
        """Add a node.

        Args:
            name: Its name.
            budget: Bytes of each device.
            devices: Its devices.
        """
        self.agents[name] = Agent(name, budget, devices=devices)
        self.report(name)
        return self.agents[name]

    def loader(self, node: str, memory: Sequence[DeviceMemory], **more: Any) -> None:
        """Let the node's loader report its separate devices, to its nodeagent too."""
        status = LoaderStatus(node=node, boot_id="b", memory=tuple(memory), **more)
        self.agents[node].units = units_by_device(status)
        self.send(LoaderStatusReceived(self.now, status))
        self.report(node)

    def report(self, *names: str) -> None:
        """Let these nodes, or all, send their status."""
        for name in names or tuple(self.agents):
            self.send(NodeStatusReceived(self.now, self.agents[name].status(self.now)))

    def tick(self, seconds: float = 0.0, *, nodes_report: bool = True, connected_since: float | None = -math.inf) -> None:
        """Let time pass; nodes report unless `nodes_report` is False."""
        self.now += seconds
        if nodes_report:
            self.report()
        self.send(Tick(self.now, connected_since))

    def model(self, name: str, weights: int = 100 * MIB, **options: Any) -> None:
        """Register a model.

        Args:
            name: Its name.
            weights: Bytes of its weights.
            options: Fields of its specification, and `shape`: that of its files.
        """
        shape = options.pop("shape", "")
        spec = ModelSpec(name=name, **{"source": f"/m/{name}"} | options)
        info = model_info(spec.source, weights).model_copy(update={"shape": shape})
        answer = self.admin(AddModelsRequested(self.now, self._waiter(), (spec,), {name: info}, False))
        assert not isinstance(answer, ErrorBody), answer

    def _waiter(self) -> str:
        self._asked += 1
        return f"w{self._asked}"

    def admin(self, event: Any) -> Any:
        """Return the reply to an operator's request, None if there is none yet."""
        self.send(event)
        return self.answer(event.waiter)

    def answer(self, waiter: str) -> Any:
        return next((e.answer for e in self.effects if isinstance(e, ReplyTo) and e.waiter == waiter), None)

    def demand(self, model: str, waiting: int = 1, gateway: str = "g1", **more: Any) -> Any:
        waiter = self._waiter()
        self.send(DemandReceived(self.now, Demand(gateway=gateway, model=model, waiting=waiting, **more), waiter))
        return self.answer(waiter)

    def wake(self, model: str) -> str:
        waiter = self._waiter()
        self.send(WakeRequested(self.now, waiter, model))
        return waiter

    def sleep(self, model: str) -> str:
        waiter = self._waiter()
        self.send(SleepRequested(self.now, waiter, model))
        return waiter

    def remove(self, model: str) -> Any:
        return self.admin(RemoveModelRequested(self.now, self._waiter(), model))

    def change_node(self, node: str, action: str) -> Any:
        return self.admin(ChangeNodeRequested(self.now, self._waiter(), node, action))

    def of(self, model: str, *states: InstanceState) -> list[Running]:
        found = [r for a in self.agents.values() for r in a.instances.values() if r.command.card.name == model]
        return [r for r in found if (r.state in states if states else r.state.holds_memory)]

    def get_ready(self, *models: str) -> None:
        """Let every start of these models (or of all) succeed now."""
        for agent in self.agents.values():
            for r in agent.instances.values():
                if r.state in (InstanceState.LOADING, InstanceState.RESUMING) and (not models or r.command.card.name in models):
                    r.state, r.idle_since = InstanceState.READY, self.now
        self.report()

    def up(self, model: str, served: int = 1) -> Running:
        """Start one idle instance of the model that has served `served` requests."""
        self.demand(model, 1)
        self.get_ready(model)
        self.demand(model, 0)
        running = self.of(model, InstanceState.READY)[-1]
        running.completed = served
        self.report()
        return running

    def can_suspend(self, running: Running, *, left: int = 0, resume_ms: float = 100.0) -> None:
        """Let the node report that the instance can be suspended.

        Args:
            left: Bytes that it still uses while suspended.
        """
        running.left = left
        running.suspension = Suspension(
            possible=True, way="cpu", left_bytes=left, need_bytes=running.command.reserve_bytes, resume_ms=resume_ms, freed_bytes=7
        )
        self.report()

    def finish_stops(self) -> None:
        for agent in self.agents.values():
            agent.finish_stops()
        self.report()

    def fail(self, model: str, error: ErrorBody, *, is_ending: bool = False) -> None:
        """Let the instances fail.

        Args:
            is_ending: Their bytes are free after `finish_stops`.
        """
        for r in self.of(model):
            r.state, r.error, r.is_ending = InstanceState.FAILED, error, is_ending
        self.report()

    def sent(self, kind: type[E]) -> list[E]:
        return [e for e in self.effects if isinstance(e, kind)]

    def starts(self, model: str) -> list[SendStart]:
        return [e for e in self.sent(SendStart) if e.command.card.name == model]

    def stops(self, model: str) -> list[SendStop]:
        ids = {e.command.instance_id for e in self.starts(model)}
        return [e for e in self.sent(SendStop) if e.command.instance_id in ids]
