"""Memory of separate devices, whose instances share the weights that they have in common.

An instance is booked with its whole need. What several of them share is deducted once for all, as
far as the loader's report proves it, and so is what their KV caches get in turns
(shared/unit_charges.py).
"""

from __future__ import annotations

from collections.abc import Collection

from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.device_memory import held_bytes, per_device_bytes
from services.scheduler.domain.state.entities import Instance
from shared.contracts.loader import DeviceMemory, LoaderStatus, WeightsOnDevice
from shared.contracts.models import ModelCard
from shared.sizing import need_of
from shared.unit_charges import BookedWeights, SharedUnits, booked_weights, shared_units


def separate_memory(status: LoaderStatus | None, device_id: str) -> DeviceMemory | None:
    """Return a device's memory as its loader reports it; None: it is not separate, or unknown."""
    return next((m for m in status.memory if m.device_id == device_id), None) if status is not None else None


def weights_there(memory: DeviceMemory, revision: str) -> WeightsOnDevice | None:
    """Return what a device has of a revision; None: nothing is known to be there."""
    return next((w for w in memory.weights if w.weights_id == revision), None)


def bytes_on_peers(status: LoaderStatus, memory: DeviceMemory, revision: str) -> dict[str, int]:
    """Return the bytes of a revision that a device lacks, by the other device that has them.

    The loader reports nothing of a device without any unit of the revision. The device that has
    most of them counts then.
    """
    if (there := weights_there(memory, revision)) is not None:
        return {peer: n for peer, n in there.peer_bytes.items() if n}
    peers = {m.device_id: w for m in status.memory if m is not memory and (w := weights_there(m, revision)) is not None}
    # Where a load would read more than is missing, the content of the units is not known.
    known = {peer: w.total_bytes - w.missing_bytes for peer, w in peers.items() if w.read_bytes == w.missing_bytes}
    most = max(known, key=lambda peer: known[peer], default=None)
    return {most: known[most]} if most is not None and known[most] else {}


def units_on(state: ClusterState, node: str, device_id: str) -> SharedUnits | None:
    """Return the units of a separate device; None for any other."""
    loader = state.loaders.get(node)
    if loader is None or not loader.status.memory:
        return None
    memory = separate_memory(loader.status, device_id)
    return shared_units(memory) if memory is not None else None


def kv_lacking_bytes(state: ClusterState, b: Booking) -> int:
    """Return what the KV caches of a separate device want beyond what they have and can get."""
    loader = state.loaders.get(b.node)
    memory = separate_memory(loader.status, b.device_id) if loader is not None else None
    if memory is None:
        return 0
    wanted = sum(max(0, k.wanted_bytes - k.lent_bytes) for k in memory.kv)
    return max(0, wanted - memory.free_bytes - memory.reusable_bytes)


def weights_of(state: ClusterState, i: Instance) -> BookedWeights | None:
    """Return the weights that an instance books; None: it shares none, or they are unknown."""
    model = state.models.get(i.model)
    if model is None or model.card.info.revision != i.revision or i.state.parked or i.stages > 1:
        return None
    weights = booked_weights(model.card, i.kv_bytes)
    return weights if weights is not None and weights.nbytes <= i.reserve_bytes else None


def rounding_bytes(card: ModelCard) -> int:
    """Return what a separate device needs beyond an instance's need, for whole pages."""
    weights = booked_weights(card, need_of(card).kv)
    return weights.rounding_bytes if weights is not None else 0


def start_needs(b: Booking, card: ModelCard, need: int) -> int:
    """Return the bytes that an instance needs on a device, with an executor if the device has none.

    Args:
        b: The device.
        card: The instance's model.
        need: Its own need.
    """
    executor = need_of(card).executor
    return need + max(0, executor - b.executor_bytes) if executor else need


def needed_bytes(state: ClusterState, b: Booking, card: ModelCard, need: int) -> int:
    """Return the bytes that one more instance needs besides the present ones.

    Args:
        b: The device.
        card: The instance's model.
        need: Its whole need, besides its executor's.
    """
    need = start_needs(b, card, need)
    if not b.is_separate:
        return need
    units, weights = units_on(state, b.node, b.device_id), booked_weights(card, need_of(card).kv)
    if units is None or weights is None or weights.nbytes > need:
        return need
    there = _weights(state, state.on_device(b.node, b.device_id))
    return need - units.saving([*there, weights]) + units.saving(there)


def claim_bytes(state: ClusterState, i: Instance, device_id: str) -> int:
    """Return the bytes that a claim adds to a device's `held_bytes` when its start is sent."""
    whole = per_device_bytes(i, i.reserve_bytes)
    units, weights = units_on(state, i.node, device_id), weights_of(state, i)
    if units is None or weights is None:
        return whole
    sent = _weights(state, [o for o in state.on_device(i.node, device_id) if not o.is_claim])
    return whole - units.saving([*sent, weights]) + units.saving(sent)


def lacking_bytes(state: ClusterState, b: Booking, card: ModelCard, need: int, gone: Collection[str]) -> int:
    """Return the bytes that are missing for one more instance once others have left; 0: it fits.

    Args:
        b: A separate device.
        card: The instance's model.
        need: Its whole need, besides its executor's.
        gone: The instances that leave.
    """
    need = start_needs(b, card, need)
    units, weights = units_on(state, b.node, b.device_id) or SharedUnits(), booked_weights(card, need_of(card).kv)
    there = state.on_device(b.node, b.device_id)
    stay = [i for i in there if i.instance_id not in gone]
    leave = [i for i in there if i.instance_id in gone]
    added = [weights] if weights is not None and weights.nbytes <= need else []
    before = units.saving(_weights(state, there))
    after = units.saving([*_weights(state, stay), *added], _weights(state, leave))
    freed = sum(per_device_bytes(i, i.reserve_bytes) if i.is_claim else held_bytes(state, i) for i in leave)
    stages = (state.later_stages[s] for s in state.stages_on.get(b.key, ()))
    freed += sum(s.reserve_bytes for s in stages if s.first in gone)
    return max(0, b.held_bytes + b.claimed_bytes - freed + before - after + need - b.budget_bytes)


def _weights(state: ClusterState, instances: Collection[Instance]) -> list[BookedWeights]:
    return [w for i in instances if (w := weights_of(state, i)) is not None]
