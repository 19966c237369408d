"""Audit a device's pages against its records and against what processes map (invariant 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weights.store.pages import Store, audit


@dataclass(frozen=True)
class Snapshot:
    """A device at one moment.

    Attributes:
        open_arenas: Arenas that are open.
        opening: Arenas that are being opened.
        lent_to: Borrowers that the device knows, each with its process (None: unknown, or of an
            earlier loader, whose pages are in another file); None: they are not checked.
        changed_units: Units whose bytes loads found changed since the loader's start.
    """

    device_id: str
    store: Store
    open_arenas: frozenset[str]
    opening: frozenset[str]
    lent_to: Mapping[str, int | None] | None = None
    changed_units: int = 0


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        held_back_pages: Reusable pages that a process still maps: they are not reclaimed yet.
        unclaimed_pages: Lent pages that the borrower's process does not map: it is about to, or has
            unmapped them and is about to return them.
        processes: Processes that map pages.
        violations: Violations of conservation; none in a correct device.
    """

    snapshot: Snapshot
    held_back_pages: int = 0
    unclaimed_pages: int = 0
    processes: tuple[int, ...] = ()
    violations: tuple[str, ...] = ()


def audit_records(snapshot: Snapshot) -> list[str]:
    """Return the violations within the records: pages, holders and borrowers."""
    store, holders = snapshot.store, snapshot.open_arenas | snapshot.opening
    found = audit(store)
    for unit in store.units.values():
        found += [f"unit {unit.key} has holder {h}, which is not open" for h in sorted(unit.holders - holders)]
    if snapshot.lent_to is not None:
        found += [
            f"{len(store.lent[b])} pages are lent to {b}, which is unknown"
            for b in sorted(set(store.lent) - snapshot.lent_to.keys())
        ]
    return found


def audit_mappings(before: Snapshot, mapped: Mapping[int, Sequence[int]], after: Snapshot) -> Audit:
    """Audit a device with the pages that processes map.

    An engine maps its pages before it asks whether they are still its own, so a violation that an
    immediate second audit does not repeat is none (`confirm`).

    Args:
        before: The device before `mapped` was read.
        mapped: Processes by page, from /proc/*/maps.
        after: The device after `mapped` was read.
    """
    earlier = set(audit_records(before))
    found = [text for text in audit_records(after) if text in earlier]
    free = frozenset(before.store.free) & frozenset(after.store.free)
    mappers = {page: ", ".join(map(str, sorted(mapped[page]))) for page in sorted(free & mapped.keys())}
    found += [f"page {page} is free, and processes {pids} map it" for page, pids in mappers.items()]
    lent = _lent_in_both(before, after)
    for page, (borrower, pid) in sorted(lent.items()):
        if others := sorted(set(mapped.get(page, ())) - {pid}):
            found.append(f"page {page} is lent to {borrower} of process {pid}, and processes {', '.join(map(str, others))} map it")
    unclaimed = sum(pid not in mapped.get(page, ()) for page, (_, pid) in lent.items())
    held_back = sum(page in mapped for u in after.store.units.values() if u.is_reusable for page in u.pages)
    processes = sorted({pid for pids in mapped.values() for pid in pids})
    return Audit(after, held_back, unclaimed, tuple(processes), tuple(found))


def _lent_in_both(before: Snapshot, after: Snapshot) -> dict[int, tuple[str, int]]:
    """Return borrower and process of the pages that were lent to a known process in both."""
    return {
        page: (borrower, pid)
        for borrower, pid in (after.lent_to or {}).items()
        if pid is not None and pid == (before.lent_to or {}).get(borrower)
        for page in set(before.store.lent.get(borrower, ())) & set(after.store.lent.get(borrower, ()))
    }


def confirm(first: Audit, second: Audit) -> Audit:
    """Return the second audit with the violations that both found."""
    repeated = tuple(v for v in second.violations if v in first.violations)
    return replace(second, violations=repeated)
