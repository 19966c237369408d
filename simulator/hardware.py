"""Simulated nodes: memories, devices, links, and what they hold."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Literal, TypeVar

from services.scheduler.domain.policies.port import DeviceView
from simulator.clock import Clock
from simulator.config import GB, NodeGroup
from simulator.links import Link, Network

Tier = Literal["dram", "ssd", "remote"]
InstanceT = TypeVar("InstanceT")
"""Instances, which this module only stores (instances.py)."""


class Cache:
    """An LRU cache of `capacity` bytes; pinned entries stay."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self.held: OrderedDict[str, int] = OrderedDict()
        self._pins: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.held

    @property
    def free(self) -> int:
        return self.capacity - self.used

    @property
    def pinned_bytes(self) -> int:
        return sum(self.held[name] for name in self._pins if name in self.held)

    def add(self, name: str, nbytes: int) -> bool:
        """Add an entry; return False if pinned entries leave too little room."""
        if name in self.held:
            self.held.move_to_end(name)
            return True
        if nbytes > self.capacity:
            return False
        if self.used + nbytes > self.capacity:
            evicted, freed = [], 0
            for other, size in self.held.items():
                if self.used - freed + nbytes <= self.capacity:
                    break
                if other not in self._pins:
                    evicted.append(other)
                    freed += size
            if self.used - freed + nbytes > self.capacity:
                return False
            for other in evicted:
                self.remove(other)
        self.held[name] = nbytes
        self.used += nbytes
        return True

    def touch(self, name: str) -> None:
        if name in self.held:
            self.held.move_to_end(name)

    def remove(self, name: str) -> None:
        self.used -= self.held.pop(name, 0)

    def pin(self, name: str) -> None:
        self._pins[name] = self._pins.get(name, 0) + 1

    def unpin(self, name: str) -> None:
        left = self._pins.pop(name, 0) - 1
        if left > 0:
            self._pins[name] = left

    def evictable_bytes(self, name: str) -> int:
        """Return the bytes that the eviction of an entry frees; 0: it is pinned, or not there."""
        return 0 if name in self._pins else self.held.get(name, 0)

    def clear(self) -> None:
        self.held.clear()
        self._pins.clear()
        self.used = 0


class Kept:
    """Weights that a stopped instance left on a device, whole or in part.

    This is Tangram's reuse store.
    """

    __slots__ = ("last_used", "model", "nbytes")

    def __init__(self, model: str, nbytes: int, last_used: float) -> None:
        self.model, self.nbytes, self.last_used = model, nbytes, last_used


class Device(Generic[InstanceT]):
    """A device.

    Attributes:
        booked: Bytes of instances.
        promised: Bytes of planned instances.
        kept: Reusable weights.
    """

    __slots__ = (
        "booked",
        "budget",
        "bus",
        "busy",
        "busy_s",
        "busy_since",
        "index",
        "instances",
        "kept",
        "kept_bytes",
        "key",
        "link",
        "loading",
        "neighbours",
        "node",
        "promised",
        "starting",
        "version",
        "view",
        "view_of",
    )

    def __init__(self, node: Node[InstanceT], index: int, group: NodeGroup) -> None:
        self.key, self.node, self.index = f"{node.name}/{index}", node, index
        self.budget = int(group.device_gb * GB)
        self.booked = self.promised = self.kept_bytes = 0
        self.instances: dict[str, InstanceT] = {}
        self.kept: dict[str, Kept] = {}
        self.link = Link(f"{self.key} device", group.links.device * GB, "device" in group.links.sequential)
        self.bus: Link | None = None
        self.neighbours: tuple[Device[InstanceT], ...] = ()
        self.loading: dict[str, bool] = {}
        """Instances that load over the bus, and whether they are heavy."""
        self.starting: set[str] = set()
        """Keys of the instances that are not ready yet."""
        self.busy, self.busy_since, self.busy_s = 0, 0.0, 0.0
        self.version = 1
        self.view_of: tuple[int, float, int, int] = (0, 0.0, 0, 0)
        self.view: DeviceView | None = None

    @property
    def path(self) -> tuple[Link, ...]:
        return (self.link,) if self.bus is None else (self.bus, self.link)

    @property
    def room(self) -> int:
        """Return the free bytes, never negative."""
        return self.budget - self.booked - self.kept_bytes

    def keep(self, model: str, nbytes: int, now: float) -> None:
        self.drop(model)
        if nbytes > 0:
            self.kept[model] = Kept(model, nbytes, now)
            self.kept_bytes += nbytes

    def drop(self, model: str, nbytes: int | None = None) -> int:
        """Drop reusable weights, all or `nbytes` of them; return the bytes dropped."""
        kept = self.kept.get(model)
        if kept is None:
            return 0
        dropped = kept.nbytes if nbytes is None else min(nbytes, kept.nbytes)
        kept.nbytes -= dropped
        self.kept_bytes -= dropped
        if kept.nbytes <= 0:
            del self.kept[model]
        return dropped

    def begin(self, now: float) -> None:
        """Count a request that begins to execute."""
        if self.busy == 0:
            self.busy_since = now
        self.busy += 1

    def end(self, now: float) -> None:
        self.busy -= 1
        if self.busy == 0:
            self.busy_s += now - self.busy_since


class Node(Generic[InstanceT]):
    def __init__(self, name: str, group: NodeGroup, clock: Clock) -> None:
        self.name, self.group, self.alive = name, group, True
        self.network = Network(clock)
        self.dram, self.ssd = Cache(int(group.dram_gb * GB)), Cache(int(group.ssd_gb * GB))
        links = group.links
        self.nic = Link(f"{name} remote", links.remote * GB, "remote" in links.sequential)
        self.disk = Link(f"{name} ssd", links.ssd * GB, "ssd" in links.sequential)
        self.peers: dict[tuple[int, int], Link] = {}
        self.devices = tuple(Device(self, n, group) for n in range(group.devices))
        if links.bus is not None:
            for first in range(0, group.devices, links.bus_devices):
                neighbours = self.devices[first : first + links.bus_devices]
                bus = Link(f"{name} bus {first}", links.bus * GB, "bus" in links.sequential)
                for device in neighbours:
                    device.bus, device.neighbours = bus, tuple(d for d in neighbours if d is not device)

    def tier(self, model: str) -> Tier:
        """Return the nearest tier with the model's weights."""
        if model in self.dram:
            return "dram"
        return "ssd" if model in self.ssd else "remote"

    def record_use(self, model: str) -> None:
        """Record a use of the model's weights where they are nearest."""
        (self.dram if model in self.dram else self.ssd).touch(model)

    def source(self, tier: Tier) -> tuple[Link, ...]:
        """Return the links from a tier to the node's memory."""
        if tier == "dram":
            return ()
        return (self.disk,) if tier == "ssd" else (self.nic,)

    def peer(self, source: Device[InstanceT], target: Device[InstanceT]) -> Link | None:
        speed = self.group.links.get_bandwidth(source.index, target.index)
        if speed <= 0:
            return None
        pair = (source.index, target.index)
        if pair not in self.peers:
            self.peers[pair] = Link(f"{self.name} {pair[0]} to {pair[1]}", speed * GB)
        return self.peers[pair]

    def links(self) -> list[Link]:
        buses = {id(d.bus): d.bus for d in self.devices if d.bus is not None}
        return [self.nic, self.disk, *(d.link for d in self.devices), *buses.values(), *self.peers.values()]
