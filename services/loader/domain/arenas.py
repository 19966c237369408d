"""Manage arenas: weights in device memory (ADR 0027).

There is one arena per entry and device that its holders compute on. An arena opens when the entry
has chunks and a holder on the device. It closes with the last such holder, or with the entry. Its
host memory stays at least as long: the shell releases a run's arenas before it vacates the chunks.
"""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain.effects import CloseArena, Effect, Freed, OpenArena
from services.loader.domain.entries import answer_waiters, put
from services.loader.domain.events import ArenaClosed, CopiedToDevice
from services.loader.domain.state import Arena, Closing, Entry, OnDevice, Stage, State

Decision = tuple[State, tuple[Effect, ...]]
_HAS_CHUNKS = (Stage.INDEXED, Stage.COMPLETE)


def open_wanted(state: State, key: str) -> Decision:
    """Open an arena on each device that the entry's holders compute on."""
    entry = state.entries[key]
    if entry.stage not in _HAS_CHUNKS:
        return state, ()
    effects: list[Effect] = []
    wanted = {h.device for h in entry.holders.values() if h.device is not None}
    for device in sorted(wanted - set(entry.arenas)):
        number = state.arenas + 1
        state = replace(state, arenas=number)
        entry = replace(entry, arenas={**entry.arenas, device: Arena(number)})
        background = all(h.background for h in entry.holders.values() if h.device == device)
        chunks = state.chunks.owned[entry.run].chunks
        order = OpenArena(entry.weights_id, entry.run, number, device, chunks, entry.total_bytes, background)
        holders = frozenset(i for i, h in entry.holders.items() if h.device == device)
        effects.append(replace(order, model=entry.model, source=entry.source, pinned=entry.pinned, opened_for=holders))
    return (put(state, entry), tuple(effects)) if effects else (state, ())


def close_unused(state: State, key: str, released_by: str) -> Decision:
    """Close the arenas on devices that no holder computes on."""
    entry = state.entries[key]
    wanted = {h.device for h in entry.holders.values()}
    gone = {d: a for d, a in entry.arenas.items() if d not in wanted}
    if not gone:
        return state, ()
    closing = {**state.closing_arenas, **{a.number: Closing(released_by) for a in gone.values()}}
    left = {d: a for d, a in entry.arenas.items() if d in wanted}
    state = put(replace(state, closing_arenas=closing), replace(entry, arenas=left))
    return state, tuple(CloseArena(a.number) for a in gone.values())


def defer_reply(state: State, instance_id: str, reply: int, cached: int) -> State | None:
    """Defer `reply` until the last arena that `instance_id` held is released.

    None if there is no such arena.
    """
    number = next((n for n, c in state.closing_arenas.items() if c.released_by == instance_id), None)
    if number is None:
        return None
    before = state.closing_arenas[number]
    waiting = replace(before, replies=(*before.replies, (reply, cached)))
    return replace(state, closing_arenas={**state.closing_arenas, number: waiting})


def abandon(state: State, reply: int) -> State:
    """Drop the abandoned release `reply` from the waiting ones."""
    if not any(r == reply for c in state.closing_arenas.values() for r, _ in c.replies):
        return state
    left = {n: replace(c, replies=tuple(x for x in c.replies if x[0] != reply)) for n, c in state.closing_arenas.items()}
    return replace(state, closing_arenas=left)


def on_closed(state: State, event: ArenaClosed) -> Decision:
    before = state.closing_arenas.get(event.number)
    left = {n: c for n, c in state.closing_arenas.items() if n != event.number}
    replies = before.replies if before is not None else ()
    return replace(state, closing_arenas=left), tuple(Freed(r, 0, cached, event.freed) for r, cached in replies)


def on_copied(state: State, event: CopiedToDevice) -> Decision:
    """Record the end of a copy.

    A report about a closed or closing arena changes nothing.
    """
    found = ((e, d) for e in state.entries.values() for d, a in e.arenas.items() if a.number == event.number)
    entry, device = next(found, (None, None))
    if entry is None or device is None:
        return state, ()
    arena = Arena(event.number, OnDevice.FAILED if event.failed else OnDevice.THERE)
    entry, effects = answer_waiters(replace(entry, arenas={**entry.arenas, device: arena}))
    return put(state, entry), effects


def without_arenas(entry: Entry) -> Entry:
    """Drop the arenas of a finished run, whose chunks are vacated."""
    return replace(entry, arenas={}) if entry.arenas else entry
