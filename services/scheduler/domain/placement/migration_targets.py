"""Find targets for a serving instance's requests (migrate-then-load, ServerlessLLM §6.2)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from services.scheduler.domain.estimates.memory_needs import device_count, start_bytes
from services.scheduler.domain.estimates.migration_times import resume_requests_s
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.constraints import Excludes, placement_rule
from services.scheduler.domain.placement.shortlist import shortlists
from services.scheduler.domain.policies.port import MigrationTarget
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.device_memory import held_bytes
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.node import InstanceState

MAX_TARGETS = 4
"""Most targets that are considered for one instance."""


def migration_targets(tx: Transaction, i: Instance, owner: Model, here: Booking) -> tuple[MigrationTarget, ...]:
    """Return the destinations for the requests of an instance, in this order.

    1. The devices of ready instances with the same weights: nothing is loaded.
    2. Devices with enough free memory that the model's placement rules allow.

    A model over several devices migrates to as many devices of one node. Such a target names the
    node only ("node/"), and the placement of the destination chooses the devices.

    Args:
        tx: The transaction.
        i: The instance.
        owner: Its model.
        here: The device to be cleared, which is no target.

    Returns:
        At most `MAX_TARGETS` targets; none if the requests cannot be migrated.
    """
    if "migrate" not in tx.policy.capabilities or "migrate" not in tx.policy.profile.uses:
        return ()
    if not owner.card.capabilities.token_resume or i.generation != owner.card.generation:
        return ()
    if any(m.source == i.instance_id for m in tx.state.migrations.values()):
        return ()
    is_single = device_count(owner.card) == 1 and len(i.device_ids) == 1
    targets = (_iter_devices if is_single else _iter_nodes)(tx, i, owner, here)
    return tuple(islice(targets, MAX_TARGETS))


def _iter_devices(tx: Transaction, i: Instance, owner: Model, here: Booking) -> Iterator[MigrationTarget]:
    for other in tx.state.live_instances(owner):
        if other.instance_id != i.instance_id and other.state is InstanceState.READY and len(other.device_ids) == 1:  # 1
            key = booking_of(tx.state, other.node, other.device_ids[0]).key
            if key != here.key:
                yield MigrationTarget(key, resume_requests_s(tx.state, i, other.node), held_bytes(tx.state, i))
    need = start_bytes(tx.state, owner.card)
    forecast = Forecast(tx.state, owner.card, tx.now)
    excludes = placement_rule(tx.state, owner)
    for devices in islice(shortlists(tx, need, (), forecast, excludes), 1):  # 2
        for b in devices:
            if b.key != here.key and _has_room(b, need, excludes):
                resume_s = resume_requests_s(tx.state, i, b.node)
                yield MigrationTarget(b.key, forecast.predict(b, leaving=False).ms / 1e3 + resume_s, b.free_bytes)


def _iter_nodes(tx: Transaction, i: Instance, owner: Model, here: Booking) -> Iterator[MigrationTarget]:
    """Yield targets for a model over several devices."""
    count = device_count(owner.card)
    ready_nodes: set[str] = set()
    for other in tx.state.live_instances(owner):
        if other.instance_id == i.instance_id or other.state is not InstanceState.READY or len(other.device_ids) != count:  # 1
            continue
        keys = {booking_of(tx.state, other.node, device).key for device in other.device_ids}
        if here.key not in keys and other.node not in ready_nodes:
            ready_nodes.add(other.node)
            yield MigrationTarget(device_key(other.node, ""), resume_requests_s(tx.state, i, other.node), held_bytes(tx.state, i))
    need = -(-start_bytes(tx.state, owner.card) // count)
    forecast = Forecast(tx.state, owner.card, tx.now)
    excludes = placement_rule(tx.state, owner)
    found: list[tuple[float, str, int]] = []
    for node in tx.state.nodes.values():  # 2; all nodes are examined, since such models are few
        keys_of_node = [device_key(node.name, device.device_id) for device in node.devices]
        others = [b for key in keys_of_node if key != here.key and (b := tx.state.bookings.get(key)) is not None]
        roomy = sorted((b for b in others if _has_room(b, need, excludes)), key=lambda b: (-b.free_bytes, b.key))[:count]
        if len(roomy) == count and node.name not in ready_nodes:
            found.append((forecast.predict(roomy[0], leaving=False).ms / 1e3, node.name, roomy[-1].free_bytes))
    for seconds, name, free in sorted(found):
        yield MigrationTarget(device_key(name, ""), seconds + resume_requests_s(tx.state, i, name), free)


def _has_room(b: Booking, need: int, excludes: Excludes | None) -> bool:
    return not b.closed_reason and b.free_bytes >= need and not (excludes is not None and excludes(b))
