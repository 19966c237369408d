"""Who goes: instances that leave a device so that another fits. Pure; least recently used first, by bytes.

Never: a pinned instance, one that `replicas.min` keeps up, one that is starting or already leaving, one that has just refused.
Unless `serving`: none that serves, none younger than `min_active` while its own requests are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.domain.draft import Draft
from services.scheduler.domain.entities import Instance, Model
from services.scheduler.domain.suspending import held_bytes, left_bytes
from shared.contracts.node import InstanceState


@dataclass(frozen=True, slots=True)
class Victims:
    """`enough`: with them gone it fits. `obstacles`: why the others may not be taken, in words."""

    ids: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    freed: int = 0
    enough: bool = True
    obstacles: str = ""


def choose_victims(d: Draft, node: str, device_id: str, short: int, model: Model, *, serving: bool, spare_wanted: bool) -> Victims:
    """Instances on the device whose leaving frees at least `short` bytes for `model`.

    Longest idle first; then those that turn out not to be needed are let off, most recently used first.
    """
    possible = []
    obstacles = []
    for i in d.state.on_device(node, device_id):
        if i.claim or i.leaving != "no" or i.model == model.key:
            continue
        if (why := _protected(d, i, serving, spare_wanted)) is None:
            possible.append(i)
        else:
            obstacles.append(f"{i.label} {why}")
    possible.sort(key=lambda i: _order(d, i))
    taken: list[Instance] = []
    freed = 0
    for i in possible:
        if freed >= short:
            break
        taken.append(i)
        freed += held_bytes(d.state, i)
    if freed < short:
        return Victims(enough=False, obstacles="; ".join(obstacles) or "nothing there can leave")
    for i in reversed(taken[:-1]):
        if freed - held_bytes(d.state, i) >= short:
            taken.remove(i)
            freed -= held_bytes(d.state, i)
    return Victims(tuple(i.instance_id for i in taken), tuple(i.label for i in taken), freed)


def _order(d: Draft, i: Instance) -> tuple[object, ...]:
    """What is started to be parked, then idle before what a suspended one has left, before serving; of the idle the least recently used; of
    the serving low priority, then the shortest queue, then the longest ready."""
    idle = d.idle_since(i.instance_id)
    owner = d.state.models.get(i.model)
    priority = owner.card.spec.priority if owner else -1000
    if i.trigger == "park" and i.state.starting:
        return (-1, i.planned_at, i.instance_id)
    if idle is not None:
        return (0, idle, i.instance_id)
    if i.state.parked:
        return (1, i.ready_at or 0.0, i.instance_id)
    seen = d.state.seen.get(i.instance_id)
    queue = seen.status.load.active + seen.status.load.waiting if seen is not None else 0
    return (2, priority, queue, i.ready_at or 0.0, i.instance_id)


def _protected(d: Draft, i: Instance, serving: bool, spare_wanted: bool) -> str | None:
    owner = d.state.models.get(i.model)
    if owner is not None and owner.card.spec.pin:
        return "is pinned"
    if i.state.parked:
        return None if left_bytes(d.state, i) else "is suspended and holds nothing"
    if i.trigger == "park" and i.state.starting:
        return None
    if i.state is not InstanceState.READY or i.ready_at is None:
        return f"is {i.state.value}"
    kept = owner is not None and owner.card.spec.replicas.min > 0 and not owner.resting
    if owner is not None and kept and i.generation == owner.card.generation:
        ready = sum(1 for other in d.state.live(owner) if other.state is InstanceState.READY)
        if ready <= owner.card.spec.replicas.min:
            return "is kept up by replicas.min"
    if not serving and d.paused(i.instance_id):
        return "is serving"
    wanted = d.state.waiting(i.model) > 0
    if spare_wanted and wanted:
        return "is wanted"
    if i.trigger != "park" and d.now - i.ready_at < d.policy.min_active and (wanted or _never_served(d, i)):
        return "has just become ready for those who wait for it"
    if not serving and d.idle_since(i.instance_id) is None:
        return "is serving"
    return None


def _never_served(d: Draft, i: Instance) -> bool:
    seen = d.state.seen.get(i.instance_id)
    return seen is None or seen.status.load.completed == 0
