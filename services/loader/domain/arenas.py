"""Weights on devices beside those in host memory: one arena for each entry and device that holders compute on (ADR 0027).

An arena is opened when the entry has chunks and a holder on the device, and closed with the last such holder, or with the entry. Its host
memory stays at least as long: a run's chunks are vacated only after its arenas are given back (the shell sees to that).
"""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain.effects import CloseArena, Effect, Freed, OpenArena
from services.loader.domain.entries import answered, put
from services.loader.domain.events import ArenaClosed, Brought
from services.loader.domain.state import Arena, Closing, Entry, OnDevice, Stage, State

Decision = tuple[State, tuple[Effect, ...]]
_HAS_CHUNKS = (Stage.INDEXED, Stage.COMPLETE)


def opened(state: State, weights_id: str) -> Decision:
    """With an arena on each device that the entry's holders compute on."""
    entry = state.entries[weights_id]
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
        effects.append(OpenArena(weights_id, entry.run, number, device, chunks, entry.total_bytes, background))
    return (put(state, entry), tuple(effects)) if effects else (state, ())


def closed(state: State, weights_id: str, released_by: str) -> Decision:
    """Without the arenas on devices that no holder computes on any more."""
    entry = state.entries[weights_id]
    wanted = {h.device for h in entry.holders.values()}
    gone = {d: a for d, a in entry.arenas.items() if d not in wanted}
    if not gone:
        return state, ()
    closing = {**state.closing_arenas, **{a.number: Closing(released_by) for a in gone.values()}}
    left = {d: a for d, a in entry.arenas.items() if d in wanted}
    state = put(replace(state, closing_arenas=closing), replace(entry, arenas=left))
    return state, tuple(CloseArena(a.number) for a in gone.values())


def awaited(state: State, instance_id: str, reply: int, cached: int) -> State | None:
    """With the release `reply` answered when the arena that `instance_id` was the last holder of is given back; None if there is none."""
    number = next((n for n, c in state.closing_arenas.items() if c.released_by == instance_id), None)
    if number is None:
        return None
    before = state.closing_arenas[number]
    waiting = replace(before, replies=(*before.replies, (reply, cached)))
    return replace(state, closing_arenas={**state.closing_arenas, number: waiting})


def abandoned(state: State, reply: int) -> State:
    """Without the release `reply` among those that wait."""
    if not any(r == reply for c in state.closing_arenas.values() for r, _ in c.replies):
        return state
    left = {n: replace(c, replies=tuple(x for x in c.replies if x[0] != reply)) for n, c in state.closing_arenas.items()}
    return replace(state, closing_arenas=left)


def on_closed(state: State, event: ArenaClosed) -> Decision:
    before = state.closing_arenas.get(event.number)
    left = {n: c for n, c in state.closing_arenas.items() if n != event.number}
    replies = before.replies if before is not None else ()
    return replace(state, closing_arenas=left), tuple(Freed(r, 0, cached, event.freed) for r, cached in replies)


def on_brought(state: State, event: Brought) -> Decision:
    """A report of an arena that is closed, or being closed, changes nothing."""
    entry = state.entries.get(event.weights_id)
    device = next((d for d, a in entry.arenas.items() if a.number == event.number), None) if entry is not None else None
    if entry is None or device is None:
        return state, ()
    arena = Arena(event.number, OnDevice.FAILED if event.failed else OnDevice.THERE)
    entry, effects = answered(replace(entry, arenas={**entry.arenas, device: arena}))
    return put(state, entry), effects


def forsaken(entry: Entry) -> Entry:
    """The run is over and its chunks are vacated: its arenas go with them."""
    return replace(entry, arenas={}) if entry.arenas else entry
