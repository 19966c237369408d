"""The units that a device has of each model's weights, and the bytes that are missing.

The loader knows the units of weights from the hashes in their checkpoint's index, or from an
earlier load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from weights.store.pages import Store, StoredUnit
from weights.store.units import PAGE_BYTES, Unit, pages_of

MOST_KNOWN = 256
"""Weights whose units are remembered; the least recently used are forgotten beyond this."""
MOST_REPORTED = MOST_KNOWN


@dataclass(frozen=True)
class ResidentWeights:
    """Bytes of some weights on a device; see `shared.contracts.loader.WeightsOnDevice`."""

    weights_id: str
    total_bytes: int
    missing_bytes: int
    read_bytes: int
    unmapped_bytes: int
    exclusive_bytes: int
    peer_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadingWeights:
    """Weights that instances of the device map or load.

    Attributes:
        keys: Keys of their units in the store, incomplete ones included.
        missing_bytes: Bytes of units that are not complete.
        unreserved_bytes: Bytes, in whole pages, of units that have no pages yet.
    """

    weights_id: str
    keys: frozenset[str]
    missing_bytes: int
    unreserved_bytes: int = 0


@dataclass(frozen=True)
class _Known:
    """Bytes of each distinct unit by key, and their sums."""

    units: Mapping[str, int]
    total_bytes: int
    page_bytes: int
    digests: Mapping[str, str] | None
    """SHA-256 of each tensor as computed by a load; None: only an index has been read."""


class KnownUnits:
    """The units of weights, for all devices of a loader. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._users: dict[str, frozenset[str]] = {}

    def learn(self, weights_id: str, units: Iterable[Unit], digests: Mapping[str, str]) -> None:
        """Remember units as a load has computed them, with the hashes of their tensors."""
        self._put(weights_id, units, {**self.digests(weights_id), **digests})

    def suppose(self, weights_id: str, units: Iterable[Unit]) -> None:
        """Remember units by the hashes in an index, unless computed ones are known."""
        self._put(weights_id, units, None)

    def digests(self, weights_id: str) -> Mapping[str, str]:
        """Return the hashes of tensors that loads of the weights have computed."""
        known = self._known.get(weights_id)
        return known.digests or {} if known is not None else {}

    def __contains__(self, weights_id: object) -> bool:
        return weights_id in self._known

    def users(self, key: str) -> frozenset[str]:
        """Return the weights that have a unit."""
        return self._users.get(key, frozenset())

    def size_of(self, weights_id: str) -> tuple[int, int] | None:
        """Return the bytes of the weights' distinct units and of their pages; None: unknown."""
        known = self._known.get(weights_id)
        return (known.total_bytes, known.page_bytes) if known is not None else None

    def _put(self, weights_id: str, units: Iterable[Unit], digests: Mapping[str, str] | None) -> None:
        sizes = {u.key: u.nbytes for u in units}
        with self._lock:
            before = self._known.get(weights_id)
            if before is not None and digests is None:
                self._known.move_to_end(weights_id)
                return
            self._forget(weights_id)
            pages = sum(map(pages_of, sizes.values()))
            self._known[weights_id] = _Known(sizes, sum(sizes.values()), pages * PAGE_BYTES, digests)
            for key in sizes:
                self._users[key] = self._users.get(key, frozenset()) | {weights_id}
            while len(self._known) > MOST_KNOWN:
                self._forget(next(iter(self._known)))

    def _forget(self, weights_id: str) -> None:
        known = self._known.pop(weights_id, None)
        for key in known.units if known is not None else ():
            if left := self._users[key] - {weights_id}:
                self._users[key] = left
            else:
                del self._users[key]


def bytes_on_peers(peers: Iterable[tuple[str, Mapping[str, int]]], store: Store, known: KnownUnits) -> dict[str, dict[str, int]]:
    """Return the bytes that a device lacks and its peers have, by weights and peer.

    Args:
        peers: Name of each peer, and the bytes of its complete units by key. A unit counts for the
            first peer that has it.
        store: The device's own pages.
        known: The units of weights.
    """
    here = {key for key, unit in store.units.items() if unit.is_complete}
    found: dict[str, dict[str, int]] = {}
    for name, units in peers:
        for key in units.keys() - here:
            for weights_id in known.users(key):
                of = found.setdefault(weights_id, {})
                of[name] = of.get(name, 0) + units[key]
        here |= units.keys()
    return found


def residency(
    store: Store,
    known: KnownUnits,
    loading: Sequence[LoadingWeights] = (),
    on_peers: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> tuple[ResidentWeights, ...]:
    """Return the weights that have units in `store`, those with most bytes there first.

    Args:
        store: The device's pages.
        known: The units of weights.
        loading: Weights that instances map or load, of known and of unknown units.
        on_peers: Result of `bytes_on_peers`.
    """
    holding: dict[str, LoadingWeights] = {}
    users: dict[str, frozenset[str]] = {}
    for each in loading:
        before = holding.get(each.weights_id)
        keys = each.keys | before.keys if before is not None else each.keys
        unreserved = max(each.unreserved_bytes, before.unreserved_bytes if before is not None else 0)
        holding[each.weights_id] = LoadingWeights(each.weights_id, keys, each.missing_bytes, unreserved)
        for key in each.keys:
            users[key] = users.get(key, frozenset()) | {each.weights_id}
    there: dict[str, list[StoredUnit]] = {}
    for key, unit in store.units.items():
        users[key] = found = users.get(key, frozenset()) | known.users(key)
        for weights_id in found:
            there.setdefault(weights_id, []).append(unit)
    rows = [
        replace(_row(w, units, known.size_of(w), holding.get(w), users), peer_bytes=on_peers.get(w, {}))
        for w, units in there.items()
    ]
    return tuple(sorted(rows, key=lambda r: (r.missing_bytes - r.total_bytes, r.weights_id))[:MOST_REPORTED])


def _row(
    weights_id: str,
    units: Collection[StoredUnit],
    sizes: tuple[int, int] | None,
    held: LoadingWeights | None,
    users: Mapping[str, frozenset[str]],
) -> ResidentWeights:
    present = sum(u.nbytes for u in units if u.is_complete)
    mapped = [u for u in units if not u.is_reusable]
    total, page_bytes = sizes or (sum(u.nbytes for u in units), 0)
    missing = held.missing_bytes if held is not None else total - present
    unmapped = held.unreserved_bytes if held is not None else page_bytes - _pages(mapped)
    exclusive = _pages([u for u in mapped if users[u.key] == {weights_id}])
    # Of known weights only what is missing is read (ADR 0058).
    read = missing if sizes is not None else total
    return ResidentWeights(weights_id, total, missing, read, unmapped, exclusive)


def _pages(units: Iterable[StoredUnit]) -> int:
    return sum(len(u.pages) for u in units) * PAGE_BYTES
