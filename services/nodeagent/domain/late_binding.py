"""Torpor's Algorithm 1 (section 5.3): the device of a start, among those that it was granted.

The inputs are measured on the node: requests that devices compute, weights that they have, and
loads on the links of their neighbours. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shared.contracts.base import Frozen
from shared.contracts.loader import LoaderStatus

Loads = Literal["none", "light", "heavy"]
Rule = Literal["resident", "peer", "quiet", "light", "host", "busy"]
"""The rule of `choose` that decided."""
HEAVY_SLOWDOWN = 1.25
"""A start beside a neighbour's load takes a heavy model this many times as long as one alone."""
_NEWEST = 0.5
"""Weight of the latest start in the mean."""
_GPU = "gpu"


class DeviceLoad(NamedTuple):
    """The load of a device at the moment of the decision.

    Attributes:
        device_id: The device.
        running: Requests that it computes, and starts that have been bound to it.
        is_resident: It has all weights of the model.
        peer_bytes_per_second: Speed of the fastest link from a busy device that has all weights of
            the model; 0: there is none.
        neighbour_loads: Loads of the devices that share its bus.
        has_executor: Its executor runs.
    """

    device_id: str
    running: int = 0
    is_resident: bool = False
    peer_bytes_per_second: float = 0.0
    neighbour_loads: Loads = "none"
    has_executor: bool = False


class Binding(Frozen):
    """The device of a start, and the state of the node that decided."""

    device_id: str
    rule: Rule
    neighbour_loads: Loads = "none"
    is_resident: bool = False
    has_executor: bool = False


def choose(devices: Sequence[DeviceLoad]) -> Binding:
    """Choose a device by Algorithm 1, with A the devices that compute nothing.

    1. A device of A has the weights: there (line 8).
    2. Only busy devices have them: the device of A with the fastest link from one of these (line
       11).
    3. No device has them: from host memory to a device of A
       a. whose neighbours load nothing (line 13), else
       b. whose neighbours load light models (line 15), else
       c. any (line 17).
    4. A is empty, where Torpor's requests wait: executors batch requests, so the device with the
       fewest, and of several one that has the weights.

    Among equals the first one: the scheduler plans the device with the most free memory, so that
    models which are idle now do not gather on one.

    Args:
        devices: The granted devices with room, at least one; the planned one first.
    """
    free = [d for d in devices if not d.running]
    if not free:
        return _bind("busy", min(devices, key=lambda d: (d.running, not d.is_resident)))
    if resident := [d for d in free if d.is_resident]:
        return _bind("resident", resident[0])
    if max(d.peer_bytes_per_second for d in free) > 0:
        return _bind("peer", max(free, key=lambda d: d.peer_bytes_per_second))
    rules: tuple[tuple[Rule, Loads], ...] = (("quiet", "none"), ("light", "light"))
    for rule, loads in rules:
        if found := [d for d in free if d.neighbour_loads == loads]:
            return _bind(rule, found[0])
    return _bind("host", free[0])


def _bind(rule: Rule, d: DeviceLoad) -> Binding:
    return Binding(
        device_id=d.device_id,
        rule=rule,
        neighbour_loads=d.neighbour_loads,
        is_resident=d.is_resident,
        has_executor=d.has_executor,
    )


class StartTimes(NamedTuple):
    """Mean seconds of a model's attaches that copied its weights from host memory.

    Attributes:
        alone_s: While no neighbour was loading; None: not measured.
        beside_s: Beside a neighbour's load; None: not measured.
    """

    alone_s: float | None = None
    beside_s: float | None = None

    @property
    def is_heavy(self) -> bool:
        """True if loads of neighbours slow its starts down, and until both have been measured."""
        if self.alone_s is None or self.beside_s is None:
            return True
        return self.beside_s >= HEAVY_SLOWDOWN * self.alone_s

    def add(self, took_s: float, *, beside: bool) -> StartTimes:
        """Return the means with one more start.

        Args:
            took_s: Seconds from the binding until it was ready.
            beside: A neighbour was loading.
        """
        if beside:
            return self._replace(beside_s=_mean(self.beside_s, took_s))
        return self._replace(alone_s=_mean(self.alone_s, took_s))


def _mean(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST * (newest - mean)


@dataclass(frozen=True)
class Traffic:
    """The loader's report of a node's devices.

    Attributes:
        loads: Loads that copy to each device, from the links `bus:DEVICE`.
        speeds: Bytes per second between two devices, from the links `p2p:DEVICE>DEVICE`.
        whole: The weights of which each device has every unit.
        buses: The bus of each device with memory of its own: GPUs of a node share one, and so do
            cpu devices of one NUMA node.
    """

    loads: Mapping[str, int] = field(default_factory=dict)
    speeds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    whole: Mapping[str, frozenset[str]] = field(default_factory=dict)
    buses: Mapping[str, str] = field(default_factory=dict)

    def list_neighbours(self, device_id: str) -> list[str]:
        """Return the devices that share the device's bus."""
        bus = self.buses.get(device_id)
        return [d for d, b in self.buses.items() if b == bus and d != device_id] if bus is not None else []


def traffic_of(status: LoaderStatus) -> Traffic:
    """Return a loader status's part that bindings use."""
    loads: dict[str, int] = {}
    speeds: dict[tuple[str, str], float] = {}
    for link in status.links:
        kind, _, name = link.link.partition(":")
        if kind == "bus":
            loads[name] = link.loads
        elif kind == "p2p" and link.bytes_per_second:
            source, _, destination = name.partition(">")
            speeds[source, destination] = link.bytes_per_second
    whole = {m.device_id: {w.weights_id for w in m.weights if not w.missing_bytes} for m in status.memory}
    buses = {m.device_id: f"numa {m.numa_node}" for m in status.memory}
    for name in loads:
        if name.startswith("cuda:"):
            buses[name] = _GPU
    for segment in status.segments:
        for device_id, nbytes in segment.on_devices.items():
            if device_id not in buses or buses[device_id] == _GPU:
                buses[device_id] = _GPU
                if nbytes >= segment.total_bytes > 0:
                    whole.setdefault(device_id, set()).add(segment.weights_id)
    return Traffic(loads, speeds, {device_id: frozenset(ids) for device_id, ids in whole.items()}, buses)
