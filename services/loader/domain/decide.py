"""Decide which instances hold weights, which loads run, and what to answer.

`domain/room.py` decides about memory.

Prepare and attach
 1. closing, fenced off, or released before → refused;
 2. the instance holds other weights → refused;
 3. unknown weights, or failed ones and a new holder → a load run;
 4. weights being evicted → a load run after the eviction;
 5. else the instance becomes a holder, with an arena on its device if it has one. Cached weights
    become held at once. A background load gets a request's priority if the new holder serves one.
    An attach is answered at its index or its last byte (on its device too), or with the run's
    error.

Release
 6. others hold them → nothing is freed;
 7. the last holder of a running load → the run is cancelled;
 8. the last holder of complete weights → they stay cached if the budget allows, evicting others;
    else they are evicted, and the release is answered when the memory is free;
 9. the last holder on a device → its arena is closed before the answer.

A report of a run other than the entry's own is stale and changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain import arenas, room
from services.loader.domain.effects import Accepted, Attached, Effect, RaisePriority, Refused, WriteRecord
from services.loader.domain.entries import device_of, has_reached, joined_by, put, start
from services.loader.domain.events import (
    Abandoned,
    Adopt,
    Adopted,
    ArenaClosed,
    Attach,
    CopiedToDevice,
    Event,
    Idle,
    MemoryPressure,
    NodeReported,
    Prepare,
    Release,
    Stop,
)
from services.loader.domain.lifecycle import adopt, handle_adopted, node_reported, stop
from services.loader.domain.release import abandon, release
from services.loader.domain.reports import apply_report
from services.loader.domain.state import Entry, Holder, Stage, State, Waiter, Wanted
from shared.contracts.loader import instance_of
from shared.contracts.stages import part_id
from shared.errors import Conflict, ShuttingDown, StaleToken, ThawError
from weights.pool import chunks

Decision = tuple[State, tuple[Effect, ...]]


def decide(state: State, event: Event, now: float) -> Decision:
    """Return the state after `event`, and the effects.

    Args:
        now: Monotonic seconds.
    """
    match event:
        case Prepare() | Attach():
            return _request_weights(state, event, now)
        case Release():
            return release(state, event, now)
        case Abandoned():
            return abandon(state, event.reply), ()
        case NodeReported():
            return node_reported(state, event, now)
        case Adopt():
            return adopt(state, event, now), ()
        case Adopted():
            return handle_adopted(state, event)
        case CopiedToDevice():
            return arenas.on_copied(state, event)
        case ArenaClosed():
            return arenas.on_closed(state, event)
        case MemoryPressure():
            return room.trim(state, event.nbytes)
        case Idle():
            return room.make_ready(state, event.room)
        case Stop():
            return stop(state)
        case _:
            return apply_report(state, event, now)


# -- prepare and attach ----------------------------------------------------------------------------


def _request_weights(state: State, event: Prepare | Attach, now: float) -> Decision:
    if (objection := _objection(state, event)) is not None:
        return state, (Refused(event.reply, objection.body()),)
    if isinstance(event, Prepare):
        state = replace(state, epoch=max(state.epoch, event.token >> 32))
    state, effects = _join(state, event, now)
    entry = state.held_by(event.instance_id)
    assert entry is not None, "it has just joined"
    state, opening = arenas.open_wanted(state, entry.key)
    effects = (*effects, *opening)
    if isinstance(event, Prepare):
        return state, (*effects, Accepted(event.reply))
    entry = state.entries[entry.key]
    if entry.stage is Stage.FAILED and entry.error is not None:
        return state, (*effects, Refused(event.reply, entry.error))
    if has_reached(entry, event.instance_id, event.until):
        return state, (*effects, Attached(event.reply, entry.key, device_of(entry, event.instance_id), event.instance_id))
    waiter = Waiter(event.reply, event.instance_id, event.until)
    return put(state, replace(entry, waiters=(*entry.waiters, waiter))), effects


def _objection(state: State, event: Prepare | Attach) -> ThawError | None:
    if state.closing:
        return ShuttingDown("The loader is shutting down")
    if isinstance(event, Prepare) and event.token >> 32 < state.epoch:
        return StaleToken(
            f"The prepare of {event.instance_id} is from leader epoch {event.token >> 32}, and epoch {state.epoch} was seen"
        )
    if event.instance_id in state.released or instance_of(event.instance_id) in state.released:
        return StaleToken(f"Instance {event.instance_id} has released its weights; a new start has a new instance id")
    held = state.held_by(event.instance_id)
    if held is not None and held.weights_id != part_id(event.card.info.revision, event.layers, event.rank):
        return Conflict(f"Instance {event.instance_id} holds the weights of {held.model} already")
    return None


def _join(state: State, event: Prepare | Attach, now: float) -> Decision:
    card, weights_id = event.card, part_id(event.card.info.revision, event.layers, event.rank)
    entry = joined_by(state, weights_id, event.instance_id, event.device)
    holder = _holder(entry, event, now)
    wanted = Wanted(card, event.traceparent, holder.background, event.layers, event.rank)
    if entry is None:
        entry = Entry(weights_id, card.name, 0, holders={event.instance_id: holder}, used_at=now)
        return start(state, entry, wanted)
    known = event.instance_id in entry.holders
    hurried = not holder.background and all(h.background for h in entry.holders.values())
    pinned = entry.pinned or card.spec.pin
    entry = replace(entry, holders={**entry.holders, event.instance_id: holder}, used_at=now, pinned=pinned)
    if entry.stage is Stage.FAILED and not known:
        return start(state, entry, wanted)
    if entry.stage is Stage.LEAVING:
        again = entry.again if entry.again is not None and not (entry.again.background and not wanted.background) else wanted
        return put(state, replace(entry, again=again)), ()
    if entry.stage is Stage.CACHED:
        entry = replace(entry, stage=Stage.COMPLETE)
        state = replace(state, chunks=chunks.mark(state.chunks, entry.run, cached=False))
    effects: tuple[Effect, ...] = ()
    if entry.stage is Stage.COMPLETE and not known and not holder.local:
        effects = (WriteRecord(entry.key),)
    elif entry.stage in (Stage.LOADING, Stage.INDEXED) and hurried:
        effects = (RaisePriority(entry.run),)
    return put(state, entry), effects


def _holder(entry: Entry | None, event: Prepare | Attach, now: float) -> Holder:
    before = entry.holders.get(event.instance_id) if entry is not None else None
    device = before.device if before is not None and before.device is not None else event.device
    if isinstance(event, Prepare):
        return Holder(now, background=event.background, device=device)
    background = event.background
    if background is None:
        background = before.background if before is not None else False
    return Holder(now, local=event.local, background=background, device=device)
