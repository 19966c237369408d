"""Simulated nodes: devices, links, and the status messages that they send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.domain.cost.links import PEER_LINK
from shared.contracts.engine import EngineLoad
from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus, SegmentStatus
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus, NodeStatus, StartInstance, Suspension
from shared.contracts.phases import Phase, PhaseSpan
from simulator.config import Runtime
from simulator.instances import Instance, SimDevice, SimNode
from simulator.links import Flow, Link
from simulator.mesh.residency import Residency


@dataclass(eq=False)
class MeshInstance:
    """An instance on a node.

    Attributes:
        engine: Serves its requests.
        state: The state that the node reports.
        then: What follows after draining; empty: nothing.
        drains_until: Time at which its latest draining ends, also with requests left.
        snapshot: Bytes in host memory.
    """

    command: StartInstance
    engine: Instance
    device: SimDevice
    began: float
    tier: str = ""
    state: InstanceState = InstanceState.LOADING
    then: Literal["", "stop", "suspend"] = ""
    drains_until: float = 0.0
    completed: int = 0
    snapshot: int = 0
    suspended_at: float = 0.0
    resume_s: float = 0.0
    """Expected seconds to resume."""
    can_suspend: bool = False
    accepts_early: bool = False
    """True if it accepts requests, maybe before its weights are loaded."""
    holds: bool = False
    """True while the weights are pinned in the node's memory for it."""
    phases: tuple[tuple[Phase, float, float], ...] = ()
    """Start and end, in seconds of the simulation."""
    flows: list[Flow] = field(default_factory=list)
    ended: bool = False
    """True if its load was cancelled."""
    leaves: list[Callable[[], None]] = field(default_factory=list)
    """Functions that leave the shared fetches."""

    @property
    def key(self) -> str:
        return self.command.instance_id

    @property
    def model(self) -> str:
        return self.command.card.name

    @property
    def node(self) -> SimNode:
        return self.device.node

    @property
    def reserved(self) -> int:
        return 0 if self.state.parked or self.state is InstanceState.STOPPED else self.command.reserve_bytes


class MeshNode:
    """A node.

    Attributes:
        boot: How often its nodeagent has started.
    """

    def __init__(self, sim: SimNode, runtime: Runtime) -> None:
        self.sim, self.name, self._runtime = sim, sim.name, runtime
        self.instances: dict[str, MeshInstance] = {}
        self.boot, self.seq = 1, 1
        self.snapshots = 0
        separate = sim.devices if sim.group.memory == "separate" else ()
        self.residency = {d.key: Residency(d) for d in separate}
        """The weights of separate devices, by key."""

    @property
    def alive(self) -> bool:
        return self.sim.alive

    def device(self, device_id: str) -> SimDevice:
        return self.sim.devices[int(device_id.partition(":")[2])]

    def _peers(self, device: SimDevice) -> dict[str, Residency]:
        """Return the devices that weights are copied to `device` from."""
        others = [d for d in self.sim.devices if d is not device and self.sim.peer(d, device) is not None]
        return {f"cuda:{d.index}": self.residency[d.key] for d in others}

    def sum_reserved(self, device: SimDevice) -> int:
        return sum(i.reserved for i in self.instances.values() if i.device is device)

    def fits(self, device: SimDevice, nbytes: int) -> bool:
        return self.sum_reserved(device) + nbytes <= device.budget

    def status(self, now: float) -> NodeStatus:
        self.seq += 1
        return NodeStatus(
            node=self.name,
            boot_id=f"b{self.boot}",
            seq=self.seq,
            devices=tuple(
                DeviceStatus(
                    device_id=f"cuda:{d.index}",
                    kind="cuda",
                    budget_bytes=d.budget,
                    reserved_bytes=min(d.budget, self.sum_reserved(d)),
                )
                for d in self.sim.devices
            ),
            instances=tuple(_report(i, now) for i in self.instances.values()),
            snapshot_bytes=self.snapshots,
            snapshot_budget_bytes=self.sim.dram.capacity,
        )

    def loader_status(self) -> LoaderStatus:
        sim = self.sim
        held = {i.command.card.info.revision for i in self.instances.values() if not i.state.parked}
        cached = [
            CachedModel(weights_id=w, tier="dram", nbytes=n)
            for w, n in sim.dram.held.items()
            if w not in held and not w.startswith("snapshot:")
        ]
        cached_bytes = sum(c.nbytes for c in cached)
        cached += [CachedModel(weights_id=w, tier="ssd", nbytes=n) for w, n in sim.ssd.held.items()]
        links = [_link("remote:store", sim, sim.nic), _link("ssd:disk", sim, sim.disk)]
        links += [_link(f"bus:cuda:{d.index}", sim, d.link) for d in sim.devices]
        if self.residency:
            pairs = [(a, b, sim.peer(a, b)) for a in sim.devices for b in sim.devices if a is not b]
            links += [_link(f"{PEER_LINK}:cuda:{a.index}>cuda:{b.index}", sim, link) for a, b, link in pairs if link is not None]
        return LoaderStatus(
            node=self.name,
            boot_id=f"b{self.boot}",
            bytes_per_second=sim.nic.bandwidth,  # only remote sources; the rest is read over the node's own links
            segments=tuple(
                SegmentStatus(weights_id=w, model=w, segment=w, total_bytes=n, loaded_bytes=n, holders=())
                for w, n in sim.dram.held.items()
                if w in held
            ),
            links=tuple(links),
            memory=tuple(self.residency[d.key].memory(self._peers(d)) for d in sim.devices if self.residency),
            cached=tuple(cached),
            dram_bytes=cached_bytes,
            # Instances and snapshots hold the rest of the memory.
            dram_budget_bytes=cached_bytes + sim.dram.free if self._runtime.cache_dram else 0,
            ssd_bytes=sim.ssd.used,
            ssd_budget_bytes=sim.ssd.capacity if self._runtime.cache_ssd else 0,
        )


def _link(name: str, node: SimNode, link: Link) -> LinkStatus:
    queued = sum(f.left for f in link.flows)
    finish = node.network.estimate_seconds((link,), 0.0) if link.sequential else queued / link.bandwidth
    return LinkStatus(
        link=name, bytes_per_second=link.bandwidth, queued_bytes=int(queued), loads=len(link.flows), finish_ms=finish * 1e3
    )


def _report(i: MeshInstance, now: float) -> InstanceStatus:
    c, runs = i.command, i.engine.runs
    alive = i.state in (InstanceState.READY, InstanceState.DRAINING)
    return InstanceStatus(
        instance_id=c.instance_id,
        plan_id=c.plan_id,
        token=c.token,
        model=i.model,
        generation=c.card.generation,
        revision=c.card.info.revision,
        device_ids=c.device_ids,
        state=i.state,
        accepts_requests=i.accepts_early and i.state is InstanceState.LOADING,
        capacity=i.engine.capacity,
        memory=InstanceMemory(reserved=i.reserved),
        load=EngineLoad(
            active=len(runs),
            completed=i.completed,
            idle_ms=0 if runs else int((now - i.engine.idle_since) * 1e3),
            kv_bytes_used=sum(r.prompt + i.engine.tokens_of(r) for r in runs) * c.card.info.kv_bytes_per_token if alive else 0,
        ),
        phases=tuple(
            PhaseSpan(phase=p, start_ms=(begin - now) * 1e3, duration_ms=(end - begin) * 1e3, process="engine")
            for p, begin, end in i.phases
        )
        if i.state is InstanceState.READY
        else (),
        suspension=Suspension(
            possible=i.can_suspend,
            way="cuda" if i.can_suspend else None,
            freed_bytes=c.reserve_bytes if i.snapshot else 0,
            snapshot_bytes=i.snapshot,
            need_bytes=c.reserve_bytes,
            resume_ms=i.resume_s * 1e3,
        ),
    )
