"""An audit's view of a device."""

from __future__ import annotations

from weights.store.auditing import Snapshot
from weights.store.pages import Store, complete, release, reserve
from weights.store.units import PAGE_BYTES, Unit


def snapshot() -> Snapshot:
    """Return a device of four pages: `kept` is reusable on page 0, `used` is mapped on page 1."""
    store = Store.empty(4)
    for holder, key in (("arena-1", "kept"), ("arena-2", "used")):
        found = reserve(store, holder, "m", [Unit(key, 0, PAGE_BYTES)], 0.0, lambda _: 0.0)
        assert found is not None
        store = complete(found.store, [key])
    store, _ = release(store, "arena-1", 1.0)
    return Snapshot("cpu:1", store, frozenset({"arena-2"}), frozenset())
