"""A fake nodeagent and loader that hold no memory, for schedulers and gateways.

They speak the contracts over NATS. The agent books its device as a real one does (all or nothing,
fenced tokens), starts an instance in `start_s`, and stops an idle one at once. Tests change its
behaviour by its fields.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field

from shared.contracts import subjects
from shared.contracts.base import Done, ErrorBody, Message
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import (
    LOADER_COMMAND,
    AttachWeights,
    CancelPrefetch,
    DeviceMemory,
    ExpectModels,
    Inspected,
    InspectModel,
    LoaderCommand,
    LoaderStatus,
    PrefetchWeights,
    PrepareWeights,
    ReleaseWeights,
    WeightsReleased,
)
from shared.contracts.model_info import ModelInfo
from shared.contracts.node import (
    NODE_COMMAND,
    Capability,
    DeviceStatus,
    InstanceMemory,
    InstanceState,
    InstanceStatus,
    NodeCommand,
    NodeStatus,
    ResumeInstance,
    StartInstance,
    StatusWanted,
    StopInstance,
    SuspendInstance,
    Suspension,
)
from shared.contracts.phases import Phase, PhaseSpan
from shared.errors import CheckpointInvalid, InstanceBusy, InsufficientMemory, InvalidRequest, NotFound, StaleToken, Unavailable
from shared.messaging import Mesh, Responder

MIB = 2**20
PARTS = 0x1_0000_0000


def model_info(source: str, weights_bytes: int = 64 * MIB) -> ModelInfo:
    return ModelInfo(
        source=source,
        revision=f"rev-{source}",
        architecture="LlamaForCausalLM",
        model_type="llama",
        task="generate",
        weights_bytes=weights_bytes,
        parameters=weights_bytes // 2,
        dtype="bfloat16",
        context_length=2048,
        kv_bytes_per_token=1024,
    )


@dataclass
class FakeInstance:
    command: StartInstance
    state: InstanceState = InstanceState.PREPARING
    load: EngineLoad = EngineLoad()
    error: ErrorBody | None = None
    freed_bytes: int | None = None
    phases: tuple[PhaseSpan, ...] = ()


@dataclass
class FakeNode:
    """One node with one cpu device.

    Attributes:
        sizes: Bytes of weights by source, for `InspectModel`.
    """

    mesh: Mesh
    node: str = "node-0"
    budget: int = 1024 * MIB
    start_s: float = 0.02
    status_s: float = 0.5
    sizes: dict[str, int] = field(default_factory=dict)
    out_of_reach: set[str] = field(default_factory=set)
    fail_starts: list[ErrorBody] = field(default_factory=list)
    refuse_starts: list[ErrorBody] = field(default_factory=list)
    hold_starts: asyncio.Event | None = None
    hold_inspection: asyncio.Event | None = None
    """The next inspection is answered only after this is set."""
    loads: bool = True
    """True if it is the node's loader too, instead of a real one."""
    memory: tuple[DeviceMemory, ...] = ()
    """The loader's report of separate devices."""
    suspends: bool = False
    """True if it can suspend; otherwise it stops instead."""
    instances: dict[str, FakeInstance] = field(default_factory=dict)
    commands: list[NodeCommand | LoaderCommand] = field(default_factory=list)
    highest_token: int = 0
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    seq: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _responders: list[Responder] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._responders = [
            self.mesh.respond(subjects.node_command(self.node), NODE_COMMAND, self._command),
            self.mesh.listen(subjects.STATUS_WANTED, StatusWanted, self._wanted),
        ]
        if self.loads:
            self._responders.append(
                self.mesh.respond(subjects.loader_command(self.node), LOADER_COMMAND, self._loader, concurrent=True)
            )
        for responder in self._responders:
            await responder.start()
        self._spawn(self._beat())

    async def stop(self) -> None:
        """Stop sending and answering, as a node that lost power."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for responder in self._responders:
            await responder.stop()

    async def restart(self) -> None:
        """Restart the nodeagent's process; its engines keep running."""
        await self.stop()
        self.boot_id, self.seq = uuid.uuid4().hex[:8], 0
        await self.start()

    def of(self, model: str) -> list[FakeInstance]:
        """Return the model's instances that hold memory."""
        return [i for i in self.instances.values() if i.command.card.name == model and i.state.holds_memory]

    def starts(self, model: str | None = None) -> list[StartInstance]:
        return [c for c in self.commands if isinstance(c, StartInstance) and model in (None, c.card.name)]

    def started(self, model: str) -> set[str]:
        """Ids of the model's started instances; a start that is sent again counts once."""
        return {c.instance_id for c in self.starts(model)}

    async def load(self, model: str, active: int) -> None:
        """Have the model's instances serve `active` requests."""
        for i in self.of(model):
            done = i.load.completed + max(0, i.load.active - active)
            i.load = EngineLoad(active=active, completed=done)
        await self.publish()

    @property
    def reserved(self) -> int:
        return sum(i.command.reserve_bytes for i in self.instances.values() if i.state.holds_memory)

    def status(self) -> NodeStatus:
        self.seq += 1
        return NodeStatus(
            node=self.node,
            boot_id=self.boot_id,
            seq=self.seq,
            devices=(DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=self.budget, reserved_bytes=self.reserved),),
            instances=tuple(_report(i, self.suspends) for i in self.instances.values()),
            capabilities=(Capability(name="suspend:cpu", available=self.suspends, reason="" if self.suspends else "it is a fake"),),
            snapshot_budget_bytes=self.budget,
        )

    async def publish(self) -> None:
        await self.mesh.publish(subjects.node_status(self.node), self.status())
        async with self.changed:
            self.changed.notify_all()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]  # a coroutine of this class
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(self.status_s)

    async def _wanted(self, _: StatusWanted) -> None:
        await self._publish()

    async def _publish(self) -> None:
        if self.loads:
            await self.mesh.publish(
                subjects.loader_status(self.node), LoaderStatus(node=self.node, boot_id=self.boot_id, memory=self.memory)
            )
        await self.publish()

    async def _command(self, command: NodeCommand) -> Message:
        self.commands.append(command)
        if command.token < self.highest_token:
            raise StaleToken()
        self.highest_token = command.token
        if isinstance(command, StartInstance):
            self._start(command)
        elif isinstance(command, StopInstance | SuspendInstance):
            self._stop(command)
        else:
            self._resume(command)
        await self.publish()
        return Done()

    def _start(self, command: StartInstance) -> None:
        if command.instance_id in self.instances:
            return
        if self.refuse_starts:
            from shared.errors import from_body

            raise from_body(self.refuse_starts.pop(0))
        if self.reserved + command.reserve_bytes > self.budget:
            raise InsufficientMemory(f"{self.budget - self.reserved} bytes are free", should_retry=True)
        self.instances[command.instance_id] = FakeInstance(command, phases=command.phases)
        self._spawn(self._bring_up(self.instances[command.instance_id]))

    async def _bring_up(self, i: FakeInstance) -> None:
        await self._enter(i, InstanceState.LOADING)
        await asyncio.sleep(self.start_s)
        if self.hold_starts is not None:
            await self.hold_starts.wait()
        if i.state is not InstanceState.LOADING:
            return
        if self.fail_starts:
            i.error = self.fail_starts.pop(0)
            await self._enter(i, InstanceState.FAILED)
            return
        i.phases = (
            *i.phases,
            PhaseSpan(phase=Phase.LOAD, start_ms=-self.start_s * 1e3, duration_ms=self.start_s * 1e3, process="fake"),
        )
        await self._enter(i, InstanceState.READY)

    async def _enter(self, i: FakeInstance, state: InstanceState) -> None:
        i.state = state
        await self.publish()

    def _stop(self, command: StopInstance | SuspendInstance) -> None:
        i = self.instances.get(command.instance_id)
        if i is None or not i.state.holds_memory:
            return
        if i.load.active and command.only_if_idle:
            raise InstanceBusy()
        i.state = InstanceState.DRAINING
        self._spawn(self._leave(i, suspend=self.suspends and isinstance(command, SuspendInstance)))

    def _resume(self, command: ResumeInstance) -> None:
        i = self.instances.get(command.instance_id)
        if i is None or not i.state.parked:
            raise NotFound(f"{command.instance_id} is not here")
        i.state = InstanceState.RESUMING
        self._spawn(self._enter(i, InstanceState.READY))

    async def _leave(self, i: FakeInstance, *, suspend: bool) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: i.load.active == 0)
        if suspend:
            await self._enter(i, InstanceState.SUSPENDED)
            return
        i.freed_bytes = i.command.reserve_bytes
        await self._enter(i, InstanceState.STOPPED)

    async def _loader(self, command: LoaderCommand) -> Message:
        self.commands.append(command)
        match command:
            case InspectModel(spec=spec):
                if spec.source.endswith("broken"):
                    raise CheckpointInvalid(f"{spec.source}: a shard is missing")
                if (hold := self.hold_inspection) is not None:
                    self.hold_inspection = None
                    await hold.wait()
                if spec.source in self.out_of_reach:
                    raise Unavailable(f"{spec.source} cannot be reached", should_retry=True)
                return Inspected(info=model_info(spec.source, self.sizes.get(spec.source, 64 * MIB)))
            case PrepareWeights() | PrefetchWeights() | CancelPrefetch() | ExpectModels():
                return Done()
            case ReleaseWeights():
                return WeightsReleased(freed_bytes=0)
            case AttachWeights():
                raise InvalidRequest("a fake loader attaches nothing")
            case _:
                raise InvalidRequest(f"a fake loader does not answer {command.kind}")


def _report(i: FakeInstance, suspends: bool) -> InstanceStatus:
    c = i.command
    way = Suspension(possible=True, way="cpu", need_bytes=c.reserve_bytes, resume_ms=1.0)
    return InstanceStatus(
        instance_id=c.instance_id,
        plan_id=c.plan_id,
        token=c.token,
        model=c.card.name,
        generation=c.card.generation,
        revision=c.card.info.revision,
        device_ids=c.device_ids,
        state=i.state,
        memory=InstanceMemory(reserved=0 if i.state.parked else c.reserve_bytes, kv=i.load.kv_bytes_used),
        suspension=way if suspends else Suspension(reason="it is a fake"),
        freed_bytes=i.freed_bytes,
        capacity=c.card.spec.max_concurrency,
        load=i.load,
        phases=i.phases,
        traceparent=c.traceparent,
        error=i.error,
    )
