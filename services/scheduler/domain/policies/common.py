"""Shared parts of policies: candidates, victims in order, orders of asks and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.scheduler.domain.cost.cost import Clearing
from services.scheduler.domain.policies.port import Ask, Clearance, Demand, DeviceView, Option, Resident, Usage


def list_inactive(device: DeviceView, model: str = "") -> list[Resident]:
    """Return the idle and parked instances and reusable weights that may leave, of other models."""
    return [
        r
        for r in device.residents
        if r.state in ("idle", "parked", "weights")
        and not r.active
        and not r.queued
        and not r.protected_reason
        and r.model != model
    ]


def list_movable(device: DeviceView, model: str = "") -> list[Resident]:
    """Return the serving instances that may be preempted."""
    return [r for r in device.residents if r.state == "serving" and not r.protected_reason and r.model != model]


def in_order(
    victims: Iterable[Resident], short: int, how: Clearing = "evict", penalties: Mapping[str, float] | None = None
) -> Clearance | None:
    """Return the first of `victims` that free `short` bytes together; None: too few bytes.

    The penalty is the sum of theirs, in seconds.
    """
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
    """Evict idle instances, least recently used first."""
    return in_order(sorted(list_inactive(device, ask.model), key=lambda r: (r.last_used, r.key)), short)


def evict_none(ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None:
    """Evict nothing before its keep-alive ends."""
    return None


def arrivals(asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]:
    """First come, first served; at the same time by priority, then by name."""
    return sorted(asks, key=lambda a: (-a.waited_s, -a.priority, a.model, a.request_id))


def choose_soonest(ask: Ask, options: Sequence[Option], seed: str = "") -> Option | None:
    """Return the option that is ready first; of equals the cheapest, then the best fit."""
    return min(options, key=lambda o: (o.cost.total_s, o.clearance.penalty_s, o.free_bytes, o.key), default=None)


def keep_setting(keep_alive: float, load_s: float) -> float:
    """Keep as the model's setting says."""
    return keep_alive


def keep_load_time(keep_alive: float, load_s: float) -> float:
    """Keep as long as loading took, "following prior work" (ServerlessLLM §7.4)."""
    return load_s


def keep_until_needed(keep_alive: float, load_s: float) -> float:
    """Keep until another model needs the memory."""
    return -1


def one_each(demand: Demand) -> int:
    """One instance while requests wait or run, within the model's bounds."""
    wanted = max(demand.live, 1) if demand.waiting else demand.live
    return clamp_replicas(demand, wanted)


def per_request(demand: Demand) -> int:
    """Return the number of instances that the requests fill (ServerlessLLM §7.4: concurrency 1)."""
    return clamp_replicas(demand, -(-(demand.waiting + demand.running) // max(1, demand.capacity)))


def clamp_replicas(demand: Demand, wanted: int) -> int:
    return max(demand.min_replicas, min(demand.max_replicas, wanted))
