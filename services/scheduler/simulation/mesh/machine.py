"""Simulated nodes: what their devices hold, what their links bring when, and what they report, in the mesh's own messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.simulation.config import GB, NodeGroup, Startup
from services.scheduler.simulation.hardware import Cache
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import LoaderStatus, SegmentStatus
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus, NodeStatus, StartInstance
from shared.contracts.phases import Phase, PhaseSpan


@dataclass
class MeshInstance:
    command: StartInstance
    began: float
    ready_at: float
    tier: str
    capacity: int
    phases: tuple[tuple[Phase, float, float], ...] = ()
    """Begin and end, in seconds of the simulation."""
    state: InstanceState = InstanceState.LOADING
    active: int = 0
    completed: int = 0
    idle_since: float = 0.0

    @property
    def model(self) -> str:
        return self.command.card.name

    @property
    def open(self) -> bool:
        """Whether it takes one more request."""
        return self.state is InstanceState.READY and self.active < self.capacity


@dataclass
class MeshNode:
    name: str
    group: NodeGroup
    startup: Startup
    measured: Iterator[float] | None = None
    """What recorded starts took, in their order; when they have been used up, `startup` goes on."""
    instances: dict[str, MeshInstance] = field(default_factory=dict)
    seq: int = 1
    loader_seq: int = 0

    def __post_init__(self) -> None:
        self.devices = [f"cuda:{n}" for n in range(self.group.devices)]
        self.budget = int(self.group.device_gb * GB)
        self.dram = Cache(int(self.group.dram_gb * GB))
        self.ssd = Cache(int(self.group.ssd_gb * GB))
        self._free_at: dict[str, float] = {}

    def reserved(self, device: str) -> int:
        there = [i.command for i in self.instances.values() if i.state is not InstanceState.STOPPED]
        return sum(c.reserve_bytes for c in there if device in c.device_ids)

    def fits(self, command: StartInstance) -> bool:
        return all(self.reserved(d) + command.reserve_bytes <= self.budget for d in command.device_ids)

    def start(self, command: StartInstance, now: float, capacity: int) -> MeshInstance:
        """Begin loading. The slowest link passed decides; each brings one load after the other, and chunks flow on as they come."""
        weights, nbytes = command.card.info.revision, command.card.info.weights_bytes
        links, tier = self.group.links, "dram"
        arrived = now
        if weights not in self.dram.held:
            tier = "ssd" if weights in self.ssd.held else "remote"
            arrived = self._through(tier, now, nbytes, links.ssd if tier == "ssd" else links.remote)
        loaded = max(arrived, *(self._through(d, now, nbytes, links.device) for d in command.device_ids))
        for cache in (self.dram, self.ssd):
            cache.add(weights, nbytes)
        self.dram.pin(weights)
        s = self.startup
        usual = s.container_s + s.context_s + s.libraries_s
        engine = now + (next(self.measured, usual) if self.measured is not None else usual)
        ready = max(loaded, engine) + s.init_s
        phases = ((Phase.LOAD, now, loaded), (Phase.CONTAINER, now, engine), (Phase.INIT, max(loaded, engine), ready))
        instance = self.instances[command.instance_id] = MeshInstance(command, now, ready, tier, capacity, phases)
        return instance

    def _through(self, link: str, now: float, nbytes: int, speed: float) -> float:
        done = max(now, self._free_at.get(link, 0.0)) + nbytes / (speed * GB)
        self._free_at[link] = done
        return done

    def gone(self, instance: MeshInstance) -> None:
        del self.instances[instance.command.instance_id]
        self.dram.unpin(instance.command.card.info.revision)

    def status(self, now: float) -> NodeStatus:
        self.seq += 1
        return NodeStatus(
            node=self.name,
            boot_id="b",
            seq=self.seq,
            devices=tuple(
                DeviceStatus(device_id=d, kind="cuda", budget_bytes=self.budget, reserved_bytes=self.reserved(d))
                for d in self.devices
            ),
            instances=tuple(_report(i, now) for i in self.instances.values()),
        )

    def loader_status(self) -> LoaderStatus:
        return LoaderStatus(
            node=self.name,
            boot_id="b",
            bytes_per_second=self.group.links.ssd * GB,
            segments=tuple(
                SegmentStatus(weights_id=w, model=w, segment=w, total_bytes=n, loaded_bytes=n, holders=())
                for w, n in self.dram.held.items()
            ),
        )


def _report(i: MeshInstance, now: float) -> InstanceStatus:
    c = i.command
    gone = i.state is InstanceState.STOPPED
    ready = i.state is InstanceState.READY
    return InstanceStatus(
        instance_id=c.instance_id,
        plan_id=c.plan_id,
        token=c.token,
        model=i.model,
        generation=c.card.generation,
        revision=c.card.info.revision,
        device_ids=c.device_ids,
        state=i.state,
        capacity=i.capacity,
        memory=InstanceMemory(reserved=0 if gone else c.reserve_bytes),
        load=EngineLoad(active=i.active, completed=i.completed, idle_ms=0 if i.active else int((now - i.idle_since) * 1e3)),
        phases=tuple(
            PhaseSpan(phase=p, start_ms=(begin - now) * 1e3, duration_ms=(end - begin) * 1e3, process="engine")
            for p, begin, end in i.phases
        )
        if ready
        else (),
    )
