"""Audit arenas against the entries and instances that they belong to (invariant 12)."""

from __future__ import annotations

from collections.abc import Mapping

from services.loader.domain.state import Stage, State

Arenas = Mapping[str, tuple[str, int]]
"""Weights id and number of each arena that has memory on a device, by the arena's holder name."""


def unowned_arenas(state: State, arenas: Arenas) -> list[str]:
    """Return the arenas that belong to no instance and are not being closed."""
    found = []
    for holder, (weights_id, number) in sorted(arenas.items()):
        entries = [e for e in state.entries.values() if e.weights_id == weights_id]
        is_owned = any(a.number == number for e in entries for a in e.arenas.values())
        is_ending = number in state.closing_arenas or any(e.stage is Stage.LEAVING for e in entries)
        if not is_owned and not is_ending:
            found.append(f"{holder} of {weights_id} belongs to no instance")
    return found


def instances_on(state: State, device: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the holders of weights on a device, and those that the nodeagent does not list."""
    holders = {i: h for e in state.entries.values() for i, h in e.holders.items() if h.device == device}
    return tuple(sorted(holders)), tuple(sorted(i for i, h in holders.items() if h.missing is not None))
