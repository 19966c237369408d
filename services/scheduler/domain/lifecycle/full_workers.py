"""The promises of full workers (state/full_workers.py), from their decision to their end. Pure.

1. They are made with their group, in the same decision.
2. The instance that replaces the group on the device uses the promise. If it ends while the group
   serves on (its start has failed, say), the memory is promised again if it is still free.
3. A promise ends with its group, however that ends; once the group is to stop; when its model
   changes; when its node is cordoned or gone; and when a whole instance of the model is on its
   device. It also ends where the memory of a device turns out to be less than was promised.
4. It yields to a model that would otherwise wait, or interrupt an instance that serves.
5. A new leader makes it again from the plan of the group, where there is still room, or where the
   instance that replaces the group is.

Without it the group serves on, and is consolidated where a device has free memory.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.domain.estimates.memory_needs import start_bytes
from services.scheduler.domain.placement.place import Placement
from services.scheduler.domain.state.accounting import booking_of
from services.scheduler.domain.state.booking import device_key
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.full_workers import FullWorker
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.values import replace
from shared.contracts.plans import Candidate

INTERRUPTING = ("preempt", "migrate")
"""Ways of clearing a device by which an instance is interrupted that serves."""


def promise_full_workers(tx: Transaction, group: Instance, chosen: Candidate) -> None:
    """Rule 1: promise the memory of the first `full_workers` devices of a group."""
    for f in _list_promises(tx, group, chosen):
        tx.put(f)


def use_promise(tx: Transaction, instance: Instance) -> None:
    """Rule 2: the device's promise becomes the memory of the instance that starts there."""
    if tx.state.full_workers and instance.stages == 1:
        for f in _of_model_on(tx, instance.model, tx.state.devices_of(instance)):
            tx.put(replace(f, used_by=instance.instance_id))


def restore_full_workers(tx: Transaction) -> None:
    """Rule 5: the last leader's promises are in the plans of its groups."""
    for group in tx.state.instances.values():
        plan = tx.state.plans.get(group.plan_id) if group.stages > 1 else None
        if plan is None or plan.chosen is None or not plan.chosen.later_devices or plan.instance_id != group.instance_id:
            continue
        for f in _list_promises(tx, group, plan.chosen):
            user = next(iter(_list_replacing(tx, f)), None)
            if user is not None:
                tx.put(replace(f, used_by=user.instance_id))
            elif booking_of(tx.state, f.node, f.device_id).free_bytes >= f.reserve_bytes:
                tx.put(f)


def settle_full_workers(tx: Transaction) -> None:
    """Rules 2 and 3, at the end of each decision."""
    for f in list(tx.state.full_workers.values()):
        if f.used_by is not None and f.used_by not in tx.state.instances:
            f = replace(f, used_by=None)
            tx.put(f)
        if not _is_kept(tx, f):
            tx.drop(FullWorker, f.key)


def end_unfillable_promises(tx: Transaction, node: str, device: str) -> None:
    """Rule 3: end the promises of a device that has less memory than is booked."""
    for key in tx.state.promised_on.get(device_key(node, device), ()):
        if booking_of(tx.state, node, device).free_soon_bytes >= 0:
            return
        if tx.state.full_workers[key].used_by is None:
            tx.drop(FullWorker, key)


def place_before_promises(tx: Transaction, name: str, place: Callable[[Transaction], Placement]) -> Placement:
    """Place a model that requests wait for; promises of other models yield where it needs that (4).

    Args:
        tx: The decision's transaction.
        name: The model.
        place: Its placement; called again without the promises if it has to wait with them.
    """
    found = place(tx)
    others = [f for f in tx.state.full_workers.values() if f.model != name and f.used_by is None]
    if not others or not _must_wait(found):
        return found
    without = Transaction(tx.state, tx.now, tx.policy)
    for f in others:
        without.drop(FullWorker, f.key)
    better = place(without)
    if better.chosen is None or _must_wait(better):
        return found
    used = {*(device_key(better.chosen.node, d) for d in better.chosen.device_ids), *better.chosen.later_devices}
    for f in others:
        if f.device in used:
            tx.drop(FullWorker, f.key)
    return better


def _must_wait(placement: Placement) -> bool:
    return placement.chosen is None or placement.chosen.clearing in INTERRUPTING


def _list_promises(tx: Transaction, group: Instance, chosen: Candidate) -> list[FullWorker]:
    model = tx.state.models.get(group.model)
    if model is None or not chosen.later_devices:  # `full_workers` of one worker is 1
        return []
    devices = (device_key(chosen.node, chosen.device_ids[0]), *chosen.later_devices)[: chosen.full_workers]
    found = []
    for device in devices:
        node, _, device_id = device.partition("/")
        nbytes = start_bytes(tx.state, model.card, device_id.partition(":")[0])
        found.append(FullWorker(group.instance_id, group.model, node, device_id, nbytes))
    return found


def _is_kept(tx: Transaction, f: FullWorker) -> bool:
    group, model, node = tx.state.instances.get(f.group), tx.state.models.get(f.model), tx.state.nodes.get(f.node)
    presence = tx.state.presence.get(f.node)
    return (
        group is not None
        and group.leaving == "no"
        and model is not None
        and group.generation == model.card.generation
        and tx.policy.consolidate
        and node is not None
        and not node.cordoned
        and presence is not None
        and presence.alive
        and (f.used_by is not None or _has_memory(tx, f))
    )


def _has_memory(tx: Transaction, f: FullWorker) -> bool:
    return not _list_replacing(tx, f) and booking_of(tx.state, f.node, f.device_id).free_soon_bytes >= 0


def _list_replacing(tx: Transaction, f: FullWorker) -> list[Instance]:
    """Return the whole instances of the model on the device."""
    return [i for i in tx.state.on_device(f.node, f.device_id) if i.stages == 1 and i.model == f.model]


def _of_model_on(tx: Transaction, model: str, devices: list[str]) -> list[FullWorker]:
    keys = [key for device in devices for key in tx.state.promised_on.get(device, ())]
    return [f for key in keys if (f := tx.state.full_workers[key]).model == model]
