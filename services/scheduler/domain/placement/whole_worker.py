"""Place a whole worker that takes over from a pipeline group, alone or with others (ADR 0062).

It takes free memory only. No instance leaves for it, because the group serves in the meantime, and
the memory of the group is given back in the end.

1. On the device of a stage: its node has a part of the weights on its disk, and a separate device
   has the stage's units, so that the missing layers alone are fetched.
2. Else on any device that the model may use.

The memory that full workers of the group are promised counts as free, and their devices are stages'
devices with room. Devices where such a start has just failed are tried last.
"""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.placement.constraints import Excludes
from services.scheduler.domain.placement.place import Placement, place
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.entities import Instance, Model
from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.shared_weights import needed_bytes
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace


def place_whole_worker(tx: Transaction, model: Model, *groups: Instance) -> Placement:
    """Return the place of a whole worker that takes over from a group, or from one of several."""
    promises = [f for f in tx.state.full_workers.values() if f.model == model.key]
    if promises:  # the model's own: of this group, or of another one that becomes instances too
        tx = Transaction(tx.state, tx.now, tx.policy)
        for f in promises:
            tx.drop(FullWorker, f.key)
    known = tx.state.consolidation_failures.get(model.key)
    failed = known.failed_devices if known is not None else ()
    stages = [device for group in groups for device in tx.state.devices_of(group)]
    found = _place(tx, model, stages, failed)  # 1
    if found.chosen is None:
        found = _place(tx, model, None, failed)  # 2
    if found.chosen is None and failed:
        found = _place(tx, model, None, ())
    names = ", ".join(group.instance_id for group in groups)
    becomes = f"the group {names} becomes one instance" if len(groups) == 1 else f"the groups {names} become instances"
    return replace(found, reason=f"{becomes}: {found.reason}")


def _place(tx: Transaction, model: Model, devices: Collection[str] | None, without: Collection[str]) -> Placement:
    """Place the worker on free memory of `devices` (None: of any), and not on those `without`."""
    return place(tx, model, 0.0, extra=True, rule=_rule(tx, model, devices, without))


def _rule(tx: Transaction, model: Model, devices: Collection[str] | None, without: Collection[str]) -> Excludes:
    need = start_bytes(tx.state, model.card)
    has_one = {key for i in tx.state.live_instances(model) if i.stages == 1 for key in tx.state.devices_of(i)}

    def excludes(b: Booking) -> str:
        if devices is not None and b.key not in devices:
            return "no stage of the group is there"
        if b.key in has_one:
            return "a whole instance of the model is there"
        if b.key in without:
            return "the last consolidation failed there"
        if needed_bytes(tx.state, b, model.card, need) > b.free_bytes:
            return "consolidation evicts no instance, and the device has no room"
        return ""

    return excludes
