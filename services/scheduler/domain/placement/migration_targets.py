"""Where the requests of an instance that serves could go on, so that another model gets its room (migrate-then-load, ServerlessLLM §6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from services.scheduler.domain.estimates.memory_needs import devices_of, need_to_start
from services.scheduler.domain.estimates.migration_times import resume_seconds
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.constraints import Excludes, checker
from services.scheduler.domain.placement.shortlist import shortlists
from services.scheduler.domain.policies.port import Move
from services.scheduler.domain.state.accounting import booking
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.device_memory import held_bytes
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Draft
from shared.contracts.node import InstanceState

MOST = 4
"""Ways out that are told of one instance."""


def ways_out(d: Draft, i: Instance, owner: Model, here: Booking) -> tuple[Move, ...]:
    """1. To a ready instance of the same weights: nothing has to be loaded. 2. To devices that have room for one as they are, where the
    model's placement rules allow it.

    A model over several devices moves to as many of one node. Such a way names the node alone ("node/"), and the destination's placement
    chooses the devices; `here`, which is to be emptied, is never among them.
    """
    if "migrate" not in d.policy.capabilities or "migrate" not in d.policy.profile.uses:
        return ()
    if not owner.card.capabilities.token_resume or i.generation != owner.card.generation:
        return ()
    if any(m.source == i.instance_id for m in d.state.moves.values()):
        return ()
    ways = _to_devices if devices_of(owner.card) == 1 and len(i.device_ids) == 1 else _to_sets
    return tuple(islice(ways(d, i, owner, here, resume_seconds(d.state, i)), MOST))


def _to_devices(d: Draft, i: Instance, owner: Model, here: Booking, resume_s: float) -> Iterator[Move]:
    for other in d.state.live(owner):
        if other.instance_id != i.instance_id and other.state is InstanceState.READY and len(other.device_ids) == 1:  # 1
            key = booking(d.state, other.node, other.device_ids[0]).key
            if key != here.key:
                yield Move(key, resume_s, held_bytes(d.state, i))
    need = need_to_start(d.state, owner.card)
    forecast = Forecast(d.state, owner.card, d.now)
    excludes = checker(d.state, owner)
    for devices in islice(shortlists(d, need, (), forecast, excludes), 1):  # 2
        for b in devices:
            if b.key != here.key and _has_room(b, need, excludes):
                yield Move(b.key, forecast.at(b, leaving=False).ms / 1e3 + resume_s, b.free)


def _to_sets(d: Draft, i: Instance, owner: Model, here: Booking, resume_s: float) -> Iterator[Move]:
    """`free` of a way: what each device of the set has; victims are counted by what they hold of one device."""
    count = devices_of(owner.card)
    ready: set[str] = set()
    for other in d.state.live(owner):
        if other.instance_id == i.instance_id or other.state is not InstanceState.READY or len(other.device_ids) != count:  # 1
            continue
        keys = {booking(d.state, other.node, device).key for device in other.device_ids}
        if here.key not in keys and other.node not in ready:
            ready.add(other.node)
            yield Move(device_key(other.node, ""), resume_s, held_bytes(d.state, i))
    need = -(-need_to_start(d.state, owner.card) // count)
    forecast = Forecast(d.state, owner.card, d.now)
    excludes = checker(d.state, owner)
    found: list[tuple[float, str, int]] = []
    for node in d.state.nodes.values():  # 2; every node is looked at: such models are few
        keys_of_node = [device_key(node.name, device.device_id) for device in node.devices]
        there = [b for key in keys_of_node if key != here.key and (b := d.state.bookings.get(key)) is not None]
        roomy = sorted((b for b in there if _has_room(b, need, excludes)), key=lambda b: (-b.free, b.key))[:count]
        if len(roomy) == count and node.name not in ready:
            found.append((forecast.at(roomy[0], leaving=False).ms / 1e3, node.name, roomy[-1].free))
    for seconds, name, free in sorted(found):
        yield Move(device_key(name, ""), seconds + resume_s, free)


def _has_room(b: Booking, need: int, excludes: Excludes | None) -> bool:
    return not b.closed and b.free >= need and not (excludes is not None and excludes(b))
