"""Changes of entries that several decisions share."""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain.effects import Attached, Effect, StartRun
from services.loader.domain.state import Entry, OnDevice, Stage, State, Until, Wanted


def put(state: State, entry: Entry) -> State:
    return replace(state, entries={**state.entries, entry.key: entry})


def drop(state: State, key: str) -> State:
    return replace(state, entries={k: v for k, v in state.entries.items() if k != key})


def joined_by(state: State, weights_id: str, instance_id: str, device: str | None) -> Entry | None:
    """Return the entry that a holder of weights joins: the one of its device, or the whole one."""
    held = state.held_by(instance_id)
    if held is not None and held.weights_id == weights_id:
        return held
    ours = (e for e in state.entries.values() if e.weights_id == weights_id and e.device is not None and e.device == device)
    usable = (e for e in ours if e.stage in (Stage.LOADING, Stage.INDEXED, Stage.COMPLETE))
    return next(usable, state.entries.get(weights_id))


def start(state: State, entry: Entry, wanted: Wanted) -> tuple[State, tuple[Effect, ...]]:
    """Start a new run for `entry`; its holders and waiters stay, all else is reset."""
    run, card = state.runs + 1, wanted.card
    entry = Entry(
        entry.weights_id,
        card.name,
        run,
        holders=entry.holders,
        waiters=entry.waiters,
        source=card.info.source,
        pinned=card.spec.pin,
        used_at=entry.used_at,
    )
    order = StartRun(entry.weights_id, run, card, wanted.traceparent, wanted.background, wanted.layers, wanted.rank)
    return put(replace(state, runs=run), entry), (order,)


def has_reached(entry: Entry, instance_id: str, until: Until) -> bool:
    """True if an attach of this holder may be answered.

    On a device that is when the copy there is complete or has failed.
    """
    if until == "index":
        return entry.stage in (Stage.INDEXED, Stage.COMPLETE)
    arena = entry.arenas.get(device_of(entry, instance_id) or "")
    return entry.stage is Stage.COMPLETE and (arena is None or arena.stage is not OnDevice.COMING)


def device_of(entry: Entry, instance_id: str) -> str | None:
    holder = entry.holders.get(instance_id)
    return holder.device if holder is not None else None


def answer_waiters(entry: Entry) -> tuple[Entry, tuple[Effect, ...]]:
    """Answer the waiters that have what they wait for."""
    over = tuple(w for w in entry.waiters if has_reached(entry, w.instance_id, w.until))
    left = tuple(w for w in entry.waiters if w not in over)
    return replace(entry, waiters=left), tuple(
        Attached(w.reply, entry.key, device_of(entry, w.instance_id), w.instance_id) for w in over
    )
