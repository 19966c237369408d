"""The scheduler's domain without I/O, with recorded effects and fake nodeagents."""

from __future__ import annotations

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
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.models import ModelSpec
from shared.contracts.node import (
    RESERVATION,
    Capability,
    DeviceStatus,
    InstanceMemory,
    InstanceState,
    InstanceStatus,
    NodeStatus,
    StartInstance,
    Suspension,
)
from shared.contracts.phases import PhaseSpan
from shared.contracts.stages import GroupPlace
from shared.errors import InstanceBusy, InsufficientMemory, NotFound, RestoreFailed, StaleToken
from shared.template_key import template_key
from shared.unit_charges import SharedUnits, booked_weights, units_by_device
from tests.support.fake_node import MIB, model_info

E = TypeVar("E", bound=Effect)


@dataclass
class Running:
    command: StartInstance
    state: InstanceState = InstanceState.LOADING
    active: int = 0
    waiting: int = 0
    completed: int = 0
    generated: int = 0
    idle_since: float = 0.0
    progress: float = 0.0
    error: ErrorBody | None = None
    suspending: bool = False
    stopped: bool = False
    left: int = 0
    accepts_requests: bool = False
    private: int = 0
    phases: tuple[PhaseSpan, ...] = ()
    suspension: Suspension = Suspension()
    is_ending: bool = False
    """It has failed, and its bytes are not proved free yet."""
    group: GroupPlace | None = None
    """Its place, if it is a stage of a group on several nodes."""
    token: int = 0
    """The last command's token, if that was a resumption."""
    queued_until: float | None = None
    """When its start or resumption gives up waiting for bytes; None if it does not wait."""

    @property
    def reserved(self) -> int:
        """Return the bytes booked for it."""
        if self.state.parked:
            return self.left
        if self.queued_until is not None:
            return 0
        return self.command.reserve_bytes if self.state.holds_memory or self.is_ending else 0


@dataclass
class Agent:
    """An obedient nodeagent; the test completes its starts and stops."""

    node: str
    budget: int
    boot: str = "boot-1"
    seq: int = 1
    highest: int = 0
    instances: dict[str, Running] = field(default_factory=dict)
    capabilities: tuple[Capability, ...] = ()
    snapshot_budget: int = 0
    devices: tuple[str, ...] = ("cpu:0",)
    labels: dict[str, str] = field(default_factory=dict)
    units: dict[str, SharedUnits] = field(default_factory=dict)
    """By separate device, as its loader reports them."""

    def reserved(self, device_id: str, more: StartInstance | None = None) -> int:
        """Return the bytes reserved on that device; instances spread evenly over devices.

        Weights that instances of a separate device share count once. `more`: with it too.
        """
        on_it = [r for r in self.instances.values() if device_id in r.command.device_ids and r.reserved]
        nbytes = sum(r.reserved // len(r.command.device_ids) for r in on_it)
        commands = [r.command for r in on_it]
        if more is not None:
            nbytes += more.reserve_bytes // len(more.device_ids)
            commands.append(more)
        weights = [w for c in commands if (w := booked_weights(c.card, c.kv_bytes)) is not None]
        nbytes += self.executor_bytes(device_id, more)
        return nbytes - (self.units[device_id].saving(weights) if device_id in self.units else 0)

    def executor_bytes(self, device_id: str, more: StartInstance | None = None) -> int:
        """Return the bytes of the device's executor, which outlives its instances."""
        commands = [r.command for r in self.instances.values()] + ([more] if more is not None else [])
        return max((c.executor_bytes for c in commands if device_id in c.device_ids), default=0)

    def fits(self, command: StartInstance, more: int) -> bool:
        if self.units or command.executor_bytes:
            return all(self.reserved(d, command) <= self.budget for d in command.device_ids)
        each = more // len(command.device_ids)
        return all(self.reserved(d) + each <= self.budget for d in command.device_ids)

    def start(self, command: StartInstance, now: float, group: GroupPlace | None = None) -> ErrorBody | None:
        if command.token < self.highest:
            return StaleToken().body()
        self.highest = command.token
        fits = self.fits(command, command.reserve_bytes)
        assert fits or command.wait_ms, "the scheduler booked more than there is"
        state = InstanceState.LOADING if fits else InstanceState.PREPARING
        until = None if fits else now + command.wait_ms / 1e3
        if command.template is not None and (taken := self.instances.get(command.template)) is not None and taken.state.parked:
            taken.state = InstanceState.STOPPED
        self.instances.setdefault(command.instance_id, Running(command, state=state, queued_until=until, group=group))
        return None

    def settle(self, now: float) -> None:
        """Grant waiting instances their bytes, or let them give up."""
        for r in self.instances.values():
            if r.queued_until is None:
                continue
            parked = r.state.parked
            if now >= r.queued_until:
                r.queued_until, r.error = None, no_room()
                r.state = r.state if parked else InstanceState.FAILED
            elif self.fits(r.command, r.suspension.need_bytes - r.left if parked else r.command.reserve_bytes):
                r.queued_until, r.state = None, InstanceState.RESUMING if parked else InstanceState.LOADING

    def stop(self, effect: SendStop) -> ErrorBody | None:
        command = effect.command
        if command.token < self.highest:
            return StaleToken().body()
        self.highest = command.token
        r = self.instances.get(command.instance_id)
        if r is not None and r.queued_until is not None:
            r.queued_until = None
            r.state = r.state if r.state.parked else InstanceState.STOPPED
        if r is not None and r.state.parked:
            r.stopped = True
        if r is None or not r.state.holds_memory:
            return None
        if command.only_if_idle and r.active:
            return InstanceBusy().body()
        r.state, r.suspending = InstanceState.DRAINING, False
        return None

    def suspend(self, effect: SendSuspend) -> ErrorBody | None:
        command = effect.command
        self.highest = max(self.highest, command.token)
        r = self.instances[command.instance_id]
        if command.only_if_idle and r.active:
            return InstanceBusy().body()
        r.state, r.suspending = InstanceState.DRAINING, True
        return None

    def resume(self, effect: SendResume, now: float) -> ErrorBody | None:
        self.highest = max(self.highest, effect.command.token)
        r = self.instances.get(effect.command.instance_id)
        if r is None or not r.state.parked:
            return NotFound(f"{effect.command.instance_id} is not here").body()
        if effect.command.device_ids and not set(effect.command.device_ids) <= set(r.suspension.moves_to):
            return RestoreFailed("its snapshot cannot be restored there").body()
        if effect.command.device_ids:
            r.command = r.command.model_copy(update={"device_ids": effect.command.device_ids})
        r.token, r.error = effect.command.token, None
        more = r.suspension.need_bytes - r.left
        if not self.fits(r.command, more):
            if effect.command.wait_ms:
                r.queued_until = now + effect.command.wait_ms / 1e3
                return None
            return no_room(None)
        r.state = InstanceState.RESUMING
        return None

    def finish_stops(self) -> None:
        for r in self.instances.values():
            if r.state is InstanceState.DRAINING and not r.active:
                r.state = InstanceState.SUSPENDED if r.suspending else InstanceState.STOPPED
            elif r.state.parked and r.stopped:
                r.state = InstanceState.STOPPED
            r.is_ending = False

    def status(self, now: float) -> NodeStatus:
        self.settle(now)
        self.seq += 1
        return NodeStatus(
            node=self.node,
            boot_id=self.boot,
            seq=self.seq,
            labels=self.labels,
            devices=tuple(
                DeviceStatus(
                    device_id=d,
                    kind="cpu",
                    budget_bytes=self.budget,
                    reserved_bytes=self.reserved(d),
                    executor_bytes=self.executor_bytes(d),
                )
                for d in self.devices
            ),
            instances=tuple(_status(r, now) for r in self.instances.values()),
            capabilities=self.capabilities,
            snapshot_bytes=sum(r.suspension.snapshot_bytes for r in self.instances.values() if r.state.parked),
            snapshot_budget_bytes=self.snapshot_budget,
        )


def _status(r: Running, now: float) -> InstanceStatus:
    c = r.command
    stopped = r.state is InstanceState.STOPPED
    return InstanceStatus(
        instance_id=c.instance_id,
        plan_id=c.plan_id,
        token=r.token or c.token,
        model=c.card.name,
        generation=c.card.generation,
        revision=c.card.info.revision,
        device_ids=c.device_ids,
        state=r.state,
        accepts_requests=r.accepts_requests,
        progress=r.progress,
        memory=InstanceMemory(
            reserved=r.reserved if r.state.parked or r.is_ending else c.reserve_bytes, kv=c.kv_bytes, private=r.private
        ),
        suspension=r.suspension,
        freed_bytes=c.reserve_bytes if stopped else None,
        capacity=c.card.spec.max_concurrency,
        load=EngineLoad(
            active=r.active,
            waiting=r.waiting,
            completed=r.completed,
            generated_tokens=r.generated,
            idle_ms=0 if r.active else max(0, int((now - r.idle_since) * 1e3)),
        ),
        error=r.error,
        phases=r.phases,
        template_key=template_key(c.card) if r.state.parked else "",
        template=c.template,
        group=r.group,
    )


@dataclass
class World:
    """The scheduler's world at time `now`; `send` decides one event.

    Commands reach the agents at once unless `deaf`.
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
        """Of nodes to the commands of a decision: they arrive once all of these are sent."""

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

    def change_leader(self) -> None:
        """Change the leader: only durable state survives, and the epoch is one higher."""
        old = self.state
        state = ClusterState(epoch=old.epoch + 1, recovered_at=self.now, keep_alive_rule=old.keep_alive_rule)
        kept: list[Entity] = [*old.models.values(), *old.nodes.values(), *old.instances.values(), *old.plans.values()]
        apply(state, [Put(e) for e in kept])
        self.state = state
        self.send(Recovered(self.now))

    def node(self, name: str = "n1", budget: int = 1000 * MIB, devices: tuple[str, ...] = ("cpu:0",)) -> Agent:
        """Add a node; `budget` is that of each device."""
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

    def tick(self, seconds: float = 0.0, *, nodes_report: bool = True) -> None:
        """Let time pass; nodes report unless `nodes_report` is False."""
        self.now += seconds
        if nodes_report:
            self.report()
        self.send(Tick(self.now))

    def model(self, name: str, weights: int = 100 * MIB, **options: Any) -> None:
        """Register a model; `shape` is that of its files."""
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
        """Let the instances fail; `is_ending`: their bytes are free after `finish_stops`."""
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


def no_room(param: str | None = RESERVATION) -> ErrorBody:
    """Return the error of a start that lacked memory.

    Without `RESERVATION` its loader or its engine lacked memory, not the node.
    """
    return InsufficientMemory("no room", param=param, should_retry=True).body()
