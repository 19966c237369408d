"""Late binding: the devices of a node that the start of a shared instance may also run on.

The plan names a device, whose memory is promised. The node binds the start to this device or to a
granted one, by what they do at that moment (ADR 0081); the bookings follow its report. Pure.
"""

from __future__ import annotations

from services.scheduler.domain.placement.constraints import placement_rule
from services.scheduler.domain.state.booking import Booking, device_key
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.shared_weights import needed_bytes
from services.scheduler.domain.state.transaction import Transaction
from shared.contracts.plans import PlanRecord

_TRIGGERS = frozenset({"demand", "wake", "min_replicas"})
"""Starts for migrations, replicas and parking are for one device."""


def granted_devices(tx: Transaction, model: Model, i: Instance, plan: PlanRecord | None) -> tuple[str, ...]:
    """Return the devices that a start may be bound to instead of its own; none: it is bound.

    1. The model shares its process, runs on one device, and takes no template's engine.
    2. The start is for requests.
    3. The devices are of the same kind, open, and have room now without a victim. The model has not
       failed there, does not run there, and its placement rules allow them.

    Args:
        tx: The decision's transaction.
        model: The instance's model.
        i: The instance.
        plan: The plan of the start.
    """
    template = plan.chosen.template if plan is not None and plan.chosen is not None else None
    if not model.card.spec.may_share or len(i.device_ids) != 1 or template is not None or i.trigger not in _TRIGGERS:  # 1, 2
        return ()
    own = tx.state.bookings.get(device_key(i.node, i.device_ids[0]))
    node = tx.state.nodes.get(i.node)
    if own is None or node is None:
        return ()
    excludes = placement_rule(tx.state, model)
    failures = tx.state.failures.get(model.key)
    avoid = {own.key, *(failures.failed_devices if failures is not None else ())}
    avoid |= {device_key(x.node, d) for x in tx.state.live_instances(model) for d in x.device_ids}
    found = []
    for device in node.devices:
        b = tx.state.bookings.get(device_key(node.name, device.device_id))
        if b is None or b.key in avoid or not _is_like(own, b) or b.closed_reason or tx.is_cooling_down(b.key):
            continue
        if needed_bytes(tx.state, b, model.card, i.reserve_bytes) <= b.free_bytes and not (excludes and excludes(b)):
            found.append(b.device_id)
    return tuple(found)


def _is_like(own: Booking, other: Booking) -> bool:
    """True if both are GPUs, or cpu devices with, or both without, memory of their own."""
    kinds = (own.device_id.partition(":")[0], other.device_id.partition(":")[0])
    return kinds[0] == kinds[1] and own.is_separate == other.is_separate
