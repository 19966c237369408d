"""Handle instances that the nodeagent no longer lists, adoption, and shutdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.loader.domain import room
from services.loader.domain.effects import CancelRun, Effect, Refused, WriteRecord
from services.loader.domain.entries import put
from services.loader.domain.events import Adopt, Adopted, NodeReported
from services.loader.domain.release import is_whole, release_hold
from services.loader.domain.state import Entry, Holder, Stage, State
from shared.contracts.loader import instance_of
from shared.errors import ShuttingDown
from weights.pool import chunks

LOST_AFTER_S = 10.0
MISSING_FOR_S = 3.0
"""A nodeagent that has just restarted may publish statuses before it has adopted its engines."""
Decision = tuple[State, tuple[Effect, ...]]


def node_reported(state: State, event: NodeReported, now: float) -> Decision:
    """Release the holds of instances that the nodeagent has not listed for a while.

    Their engines are gone and send no release.
    """
    effects: list[Effect] = []
    for key in tuple(state.entries):
        entry = state.entries.get(key)
        if entry is None:  # evicted for others that became cached just now
            continue
        holders = {i: h if h.local else _mark_seen(i, h, event, now) for i, h in entry.holders.items()}
        if holders != entry.holders:
            state = put(state, replace(entry, holders=holders))
        for instance_id in _list_lost(holders, now):
            state, more = release_hold(state, state.entries[key], instance_id, now)
            effects.extend(more)
    # When the last holders are lost together, the record of those before the last is obsolete.
    return state, tuple(e for e in effects if not isinstance(e, WriteRecord) or is_whole(state, e.key))


def _mark_seen(instance_id: str, holder: Holder, event: NodeReported, now: float) -> Holder:
    if instance_of(instance_id) in event.instances:
        return holder if holder.missing is None else replace(holder, missing=None)
    return holder if holder.missing is not None else replace(holder, missing=now)


def _list_lost(holders: Mapping[str, Holder], now: float) -> list[str]:
    return [
        i for i, h in holders.items() if h.missing is not None and now - h.missing >= MISSING_FOR_S and now - h.since > LOST_AFTER_S
    ]


def adopt(state: State, event: Adopt, now: float) -> State:
    run = state.runs + 1
    entry = Entry(
        event.weights_id,
        event.model,
        run,
        Stage.COMPLETE if event.holders else Stage.CACHED,
        directory=event.directory,
        total_bytes=event.total_bytes,
        loaded_bytes=event.total_bytes,
        holders={i: Holder(now) for i in event.holders},
        source=event.source,
        pinned=event.pinned,
        used_at=now,
    )
    table = chunks.adopt(state.chunks, run, event.chunks, event.total_bytes, cached=not event.holders)
    return put(replace(state, runs=run, chunks=table), entry)


def handle_adopted(state: State, event: Adopted) -> Decision:
    effects: list[Effect] = []
    if event.mapped:
        state, more = room.give_back(state, event.mapped)
        effects.extend(more)
    state, more = room.trim(state)
    effects.extend(more)
    state, more = room.make_ready(replace(state, ready=event.ready), event.room)
    return state, (*effects, *more)


def stop(state: State) -> Decision:
    error = ShuttingDown("The loader is shutting down").body()
    effects: list[Effect] = []
    state = replace(state, closing=True)
    for entry in tuple(state.entries.values()):
        effects.extend(Refused(w.reply, error) for w in entry.waiters)
        entry = replace(entry, waiters=())
        if entry.stage in (Stage.LOADING, Stage.INDEXED):
            effects.append(CancelRun(entry.weights_id, entry.run))
            entry = replace(entry, stage=Stage.LEAVING, wants=0, holders={}, arenas={})
        elif entry.stage is Stage.LEAVING:
            entry = replace(entry, holders={}, again=None)
        state = put(state, entry)
    return state, tuple(effects)
