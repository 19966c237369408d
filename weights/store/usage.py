"""The use of a device's pages: by model, shared, reusable, lent and free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from weights.store.lending import Borrower
from weights.store.pages import Store
from weights.store.residency import ResidentWeights
from weights.store.units import PAGE_BYTES


@dataclass(frozen=True)
class UnitsOf:
    """Bytes of one model's units, in whole pages.

    Attributes:
        shared_bytes: Mapped or reusable bytes of units that another model has as well.
    """

    model: str
    weights_id: str
    mapped_bytes: int
    reusable_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class KvOf:
    """The pages of one instance's KV cache, in bytes.

    Attributes:
        floor_bytes: Booked bytes.
        lent_bytes: Bytes that the cache has.
        wanted_bytes: Bytes that the cache asks for in total.
    """

    instance_id: str
    model: str
    floor_bytes: int
    lent_bytes: int
    wanted_bytes: int


@dataclass(frozen=True)
class PagesInUse:
    """A device's pages in bytes: free, mapped, reusable and lent are `total_bytes` together.

    Attributes:
        copied_bytes: Bytes copied to the device since the loader's start.
        reused_bytes: Bytes that loads since then did not copy, because the device had them.
        weights: The units of each model that the device has, loaded or not.
        peer_bytes: The part of `copied_bytes` from other devices.
        changed_units: Units whose bytes loads found changed since the loader's start.
        kv: The KV caches that have or want pages. The other lent pages belong to earlier loaders.
        is_lending: KV caches borrow pages of the device.
        paced_bytes_per_second: Limit of copies from host memory, for an experiment; None: no limit.
        numa_node: NUMA node that the memory is bound to; None: unbound.
    """

    device_id: str
    total_bytes: int
    free_bytes: int
    mapped_bytes: int
    reusable_bytes: int
    lent_bytes: int
    copied_bytes: int
    reused_bytes: int
    models: tuple[UnitsOf, ...]
    weights: tuple[ResidentWeights, ...] = ()
    paced_bytes_per_second: float | None = None
    numa_node: int | None = None
    peer_bytes: int = 0
    changed_units: int = 0
    kv: tuple[KvOf, ...] = ()
    is_lending: bool = True


def pages_in_use(
    device_id: str, store: Store, members: Mapping[str, tuple[str, frozenset[str]]], *, copied_bytes: int, reused_bytes: int
) -> PagesInUse:
    """Sum the pages of `store`.

    Args:
        members: Model and keys of units by weights.
    """
    users = Counter(key for _, keys in members.values() for key in keys)
    return PagesInUse(
        device_id=device_id,
        total_bytes=store.count * PAGE_BYTES,
        free_bytes=len(store.free) * PAGE_BYTES,
        mapped_bytes=store.mapped_pages * PAGE_BYTES,
        reusable_bytes=store.reusable_pages * PAGE_BYTES,
        lent_bytes=store.lent_pages * PAGE_BYTES,
        copied_bytes=copied_bytes,
        reused_bytes=reused_bytes,
        models=tuple(_units_of(store, w, m, k, users) for w, (m, k) in sorted(members.items(), key=lambda item: item[1][0])),
    )


def kv_in_use(store: Store, borrowers: Mapping[str, Borrower]) -> tuple[KvOf, ...]:
    """Return the pages of each KV cache, ordered by model."""
    found = [
        KvOf(
            b.instance_id,
            b.model,
            floor_bytes=b.floor * PAGE_BYTES,
            lent_bytes=len(store.lent.get(name, ())) * PAGE_BYTES,
            wanted_bytes=b.wanted * PAGE_BYTES,
        )
        for name, b in borrowers.items()
    ]
    return tuple(sorted(found, key=lambda k: (k.model, k.instance_id)))


def _units_of(store: Store, weights_id: str, model: str, keys: frozenset[str], users: Counter[str]) -> UnitsOf:
    units = [store.units[k] for k in keys if k in store.units]
    return UnitsOf(
        model,
        weights_id,
        mapped_bytes=sum(len(u.pages) for u in units if not u.is_reusable) * PAGE_BYTES,
        reusable_bytes=sum(len(u.pages) for u in units if u.is_reusable) * PAGE_BYTES,
        shared_bytes=sum(len(u.pages) for u in units if users[u.key] > 1) * PAGE_BYTES,
    )
