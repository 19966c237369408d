"""Charge what instances of a separate device share once: weights, and room for KV caches.

An instance books the bytes of its weights. Instances of a separate device share units, so that less
memory suffices for several of them. How much less follows from one report of the loader, whatever
its age: the units of any instances are either among those that were mapped then, or among those
of their weights that were not. The sum of both is an upper bound (ADR 0055).

Where KV caches borrow pages, each instance needs its floor, and all together need what the largest
cache may have beyond its floor: they get it in turns (ADR 0056).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.models import ModelCard
from shared.sizing import need_of


class BookedWeights(NamedTuple):
    """The part of an instance's booking that it shares with others.

    Attributes:
        nbytes: Bytes of its weights, as booked.
        rounding_bytes: What the weights take beyond that, because they fill whole pages.
        elastic_bytes: Bytes of its KV cache beyond the floor.
        executor_bytes: Bytes of its executor, beside the instance's booking.
    """

    weights_id: str
    nbytes: int
    elastic_bytes: int = 0
    rounding_bytes: int = 0
    executor_bytes: int = 0


def booked_weights(card: ModelCard, kv_bytes: int, executor_bytes: int = 0) -> BookedWeights | None:
    """Return what an instance shares with others of its device; None: nothing.

    Args:
        card: The instance's model.
        kv_bytes: Bytes of its KV cache.
        executor_bytes: Bytes of its executor.
    """
    if card.spec.engine != "builtin" or card.stages:  # stages book whole pages, and share no units
        return None
    need = need_of(card)
    rounding = max(0, card.info.page_bytes - need.weights)
    return BookedWeights(card.info.revision, need.weights, max(0, kv_bytes - need.kv_floor), rounding, executor_bytes)


@dataclass(frozen=True)
class SharedUnits:
    """A report of one device's units.

    Attributes:
        mapped_bytes: Pages of units that instances map or load, also those of an earlier loader.
        unmapped: By weights, pages of their other units. Weights without an entry may have no unit
            on the device.
        exclusive: By weights, pages of mapped units that no other weights have.
        is_lending: The KV caches of the device's instances borrow pages.
    """

    mapped_bytes: int = 0
    unmapped: Mapping[str, int] = field(default_factory=dict)
    exclusive: Mapping[str, int] = field(default_factory=dict)
    is_lending: bool = False

    def saving(self, weights: Collection[BookedWeights], gone: Collection[BookedWeights] = ()) -> int:
        """Return the bytes by which instances need less than they book together.

        Negative if they need more: their weights fill whole pages, and share too few of them.

        Args:
            weights: One for each instance.
            gone: Weights of instances of the report that no longer count.
        """
        each = {w.weights_id: w.nbytes + w.rounding_bytes for w in weights}
        left = {w.weights_id for w in gone} - each.keys()
        bound = self.mapped_bytes - sum(self.exclusive.get(w, 0) for w in left)
        bound += sum(self.unmapped.get(w, nbytes) for w, nbytes in each.items())
        elastic = [w.elastic_bytes for w in weights] if self.is_lending else []
        unshared = sum(w.nbytes + w.rounding_bytes for w in weights)
        shared = max(0, unshared - bound)
        return shared - sum(w.rounding_bytes for w in weights) + sum(elastic) - max(elastic, default=0)


def shared_units(memory: DeviceMemory) -> SharedUnits:
    """Return the units of a device as its loader reports them."""
    return SharedUnits(
        memory.mapped_bytes + memory.lent_bytes - sum(k.lent_bytes for k in memory.kv),
        {w.weights_id: w.unmapped_bytes for w in memory.weights},
        {w.weights_id: w.exclusive_bytes for w in memory.weights},
        memory.is_lending,
    )


def units_by_device(status: LoaderStatus) -> dict[str, SharedUnits]:
    """Return the units of all separate devices of a node."""
    return {memory.device_id: shared_units(memory) for memory in status.memory}
