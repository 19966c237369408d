"""Which memory models hold, and for how long: what is charged for memory over time (ADR 0087).

A node's status says what each of its devices has reserved. All of it is charged: instances that
share units or an executor share what the device has reserved, in proportion to their own
reservations, and what no instance holds is charged to no model. So the sum over the models is the
integral of the devices' reserved bytes.

A loader's status says how much host memory is cached weights (ADR 0097). Memory of its cache that
holds no weights is charged to no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.loader import LoaderStatus
from shared.contracts.node import NodeStatus
from shared.contracts.prices import MemoryKind
from shared.contracts.stages import weights_of

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one kind of memory that an instance holds.

    Attributes:
        instance_id: Empty: no instance, as the executor of a device without models. The id of the
            weights, if they are cached.
        model: Empty: no model. The revision of the weights, if they are cached: several models may
            have it.
        kind: cpu, cuda: reserved on devices of this kind. host: the snapshot of a suspended engine.
            cache: host memory with weights that no instance uses.
    """

    instance_id: str
    model: str
    kind: MemoryKind
    nbytes: float


def list_holdings(status: NodeStatus) -> tuple[Holding, ...]:
    """Return what a node's instances hold on its devices and, suspended, in its host memory."""
    found: list[Holding] = []
    for device in status.devices:
        there = [
            (s, s.memory.reserved / len(s.device_ids))
            for s in status.instances
            if device.device_id in s.device_ids and s.memory.reserved and (s.state.holds_memory or s.state.parked)
        ]
        total = sum(part for _, part in there)
        if not total and device.reserved_bytes:
            found.append(Holding("", "", device.kind, device.reserved_bytes))
        found += [Holding(s.instance_id, s.model, device.kind, device.reserved_bytes * part / total) for s, part in there]
    parked = (s for s in status.instances if s.state.parked and s.suspension.snapshot_bytes)
    return (*found, *(Holding(s.instance_id, s.model, "host", s.suspension.snapshot_bytes) for s in parked))


def list_cached(status: LoaderStatus) -> tuple[Holding, ...]:
    """Return what cached weights hold in a node's host memory, and the rest of the cache."""
    cached = [c for c in status.cached if c.tier == "dram"]
    rest = status.dram_bytes - sum(c.nbytes for c in cached)
    found = tuple(Holding(c.weights_id, weights_of(c.weights_id), "cache", c.nbytes) for c in cached)
    return (*found, Holding("", "", "cache", rest)) if rest > 0 else found


Charge = tuple[int, str, MemoryKind]
"""Hour since 1970, model, and kind of memory."""


def charge(
    before: tuple[Holding, ...],
    after: tuple[Holding, ...],
    interval: tuple[float, float],
    known_since: Callable[[str], float],
    longest_s: float,
) -> Mapping[Charge, float]:
    """Return the byte-seconds between two reports of a node, by hour, model and kind.

    What the first report says is charged. Over an interval longer than `longest_s` the node may
    have been down: only instances of both reports held their memory.

    Args:
        before: What the first report says.
        after: What the second one says.
        interval: Unix seconds of the two reports.
        known_since: Unix seconds from which an instance may be charged.
        longest_s: The longest pause between reports of a living node.
    """
    start, end = interval
    survivors = {h.instance_id for h in after if h.instance_id}
    charges: dict[Charge, float] = {}
    for h in before:
        if end - start > longest_s and h.instance_id not in survivors:
            continue
        begin = max(start, known_since(h.instance_id)) if h.instance_id else start
        for hour, seconds in _hours(begin, end):
            key = (hour, h.model, h.kind)
            charges[key] = charges.get(key, 0.0) + h.nbytes * seconds
    return charges


def _hours(start: float, end: float) -> Iterator[tuple[int, float]]:
    """Yield the seconds of an interval by the hour."""
    while start < end:
        hour = int(start // HOUR_S)
        until = min(end, (hour + 1) * HOUR_S)
        yield hour, until - start
        start = until
