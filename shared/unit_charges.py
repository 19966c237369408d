"""Charge the weights that instances of a separate device share once (ADR 0055).

An instance books the bytes of its weights. Instances of a separate device share units, so that less
memory suffices for several of them. How much less follows from one report of the loader, whatever
its age: the units of any instances are either among those that were mapped then, or among those
of their weights that were not. The sum of both is an upper bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.contracts.loader import DeviceMemory, LoaderStatus
from shared.contracts.models import ModelCard
from shared.sizing import need_of


class BookedWeights(NamedTuple):
    """The weights of one instance, and the bytes that it books for them."""

    weights_id: str
    nbytes: int


def booked_weights(card: ModelCard) -> BookedWeights | None:
    """Return the weights that an instance has in a separate device's pages; None: it has none."""
    return BookedWeights(card.info.revision, need_of(card).weights) if card.spec.engine == "builtin" else None


@dataclass(frozen=True)
class SharedUnits:
    """A report of one device's units.

    Attributes:
        mapped_bytes: Pages of units that instances map or load, also those of an earlier loader.
        unmapped: By weights, pages of their other units. Weights without an entry may have no unit
            on the device.
        exclusive: By weights, pages of mapped units that no other weights have.
    """

    mapped_bytes: int = 0
    unmapped: Mapping[str, int] = field(default_factory=dict)
    exclusive: Mapping[str, int] = field(default_factory=dict)

    def saving(self, weights: Collection[BookedWeights], gone: Collection[BookedWeights] = ()) -> int:
        """Return the bytes by which instances need less than they book together.

        Args:
            weights: One for each instance.
            gone: Of instances of the report that no longer count.
        """
        each = {w.weights_id: w.nbytes for w in weights}
        left = {w.weights_id for w in gone} - each.keys()
        bound = self.mapped_bytes - sum(self.exclusive.get(w, 0) for w in left)
        bound += sum(self.unmapped.get(w, nbytes) for w, nbytes in each.items())
        return max(0, sum(w.nbytes for w in weights) - bound)


def shared_units(memory: DeviceMemory) -> SharedUnits:
    """Return the units of a device as its loader reports them."""
    return SharedUnits(
        memory.mapped_bytes + memory.lent_bytes,
        {w.weights_id: w.unmapped_bytes for w in memory.weights},
        {w.weights_id: w.exclusive_bytes for w in memory.weights},
    )


def units_by_device(status: LoaderStatus) -> dict[str, SharedUnits]:
    """Return the units of all separate devices of a node."""
    return {memory.device_id: shared_units(memory) for memory in status.memory}
