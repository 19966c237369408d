"""What several policies have in common: who may leave at all, taking victims in an order, and orders of asks and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.scheduler.domain.cost.cost import Clearing
from services.scheduler.domain.policies.port import Ask, Clearance, Demand, DeviceView, Option, Resident, Usage


def inactive(device: DeviceView, model: str = "") -> list[Resident]:
    """Those that serve nobody and may go: idle and parked instances, and weights that are kept for reuse; not the asking model's own."""
    return [
        r
        for r in device.residents
        if r.state in ("idle", "parked", "weights")
        and not r.active
        and not r.queued
        and not r.protected_reason
        and r.model != model
    ]


def movable(device: DeviceView, model: str = "") -> list[Resident]:
    """Those that serve and may be interrupted."""
    return [r for r in device.residents if r.state == "serving" and not r.protected_reason and r.model != model]


def in_order(
    victims: Iterable[Resident], short: int, how: Clearing = "evict", penalties: Mapping[str, float] | None = None
) -> Clearance | None:
    """The first of `victims` that free `short` bytes together; None: all of them do not. The penalty is the sum of theirs, in seconds."""
    taken: list[str] = []
    freed, penalty = 0, 0.0
    for victim in victims:
        if freed >= short:
            break
        taken.append(victim.key)
        freed += victim.nbytes
        penalty += victim.reload_s if penalties is None else penalties[victim.key]
    return Clearance(how, tuple(taken), freed, penalty_s=penalty) if freed >= short else None


def evict_lru(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Idle ones leave, the least recently used first."""
    return in_order(sorted(inactive(device, ask.model), key=lambda r: (r.last_used, r.key)), short)


def evict_nobody(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Nobody leaves before its keep-alive ends."""
    return None


def arrivals(asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]:
    """First come, first served; of those of one moment the higher priority, then by name."""
    return sorted(asks, key=lambda a: (-a.waited_s, -a.priority, a.model, a.request_id))


def soonest(ask: Ask, options: Sequence[Option], seed: str = "") -> Option | None:
    """The option that is ready first; of equals the one that costs others least, on the device that keeps least memory unused."""
    return min(options, key=lambda o: (o.cost.total_s, o.clearance.penalty_s, o.free_bytes, o.key), default=None)


def keep_setting(keep_alive: float, load_s: float) -> float:
    """As the model says."""
    return keep_alive


def keep_load_time(keep_alive: float, load_s: float) -> float:
    """As long as loading took, "following prior work" (ServerlessLLM §7.4)."""
    return load_s


def keep_until_needed(keep_alive: float, load_s: float) -> float:
    """Until another needs the memory."""
    return -1


def one_each(demand: Demand) -> int:
    """One instance while anybody waits or is served, within the model's own bounds."""
    wanted = max(demand.live, 1) if demand.waiting else demand.live
    return bounded(demand, wanted)


def per_request(demand: Demand) -> int:
    """As many instances as the requests of now fill: "maximum concurrency" 1 gives one for each (ServerlessLLM §7.4)."""
    return bounded(demand, -(-(demand.waiting + demand.running) // max(1, demand.capacity)))


def bounded(demand: Demand, wanted: int) -> int:
    return max(demand.min_replicas, min(demand.max_replicas, wanted))
