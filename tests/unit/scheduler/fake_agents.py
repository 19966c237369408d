"""Obedient nodeagents without I/O, whose starts and stops a test completes."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.domain.effects import SendResume, SendStop, SendSuspend
from shared.contracts.base import ErrorBody
from shared.contracts.engine import EngineLoad
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
from shared.unit_charges import SharedUnits, booked_weights


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
    kv_used: int = 0
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

        Weights that instances of a separate device share count once.

        Args:
            more: An instance that is counted too.
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
            reserved=r.reserved if r.state.parked or r.is_ending else c.reserve_bytes, kv=r.kv_used, private=r.private
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


def no_room(param: str | None = RESERVATION) -> ErrorBody:
    """Return the error of a start that lacked memory.

    Without `RESERVATION` its loader or its engine lacked memory, not the node.
    """
    return InsufficientMemory("no room", param=param, should_retry=True).body()
