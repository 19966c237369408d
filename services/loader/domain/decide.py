"""`decide(state, event, now)`: who holds which weights, which loads run, who is answered when. Who gets memory: `domain/room.py`.

Prepare and attach
 1. closing, fenced off, or released before → refused;
 2. the instance holds other weights → refused;
 3. unknown weights, or failed ones and a new holder → a load run;
 4. weights just leaving → a load run as soon as they have left;
 5. else the instance joins (cached weights are held again at once, a background load hurries for a holder that is waited for); an attach is
    answered once its index or its last byte is there, with the run's error if it failed.

Release
 6. others hold them → nothing is freed;
 7. the last holder of a running load → the run is called off;
 8. of complete weights → they stay cached if the budget holds them, and others leave for them; else they leave, answered when memory is free.

A report of a run other than the entry's own is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.loader.domain import chunks, room
from services.loader.domain.entries import drop, put, reached, start
from services.loader.domain.events import (
    Abandoned,
    Accepted,
    Adopt,
    Adopted,
    Attach,
    Attached,
    CancelRun,
    Effect,
    Event,
    Freed,
    Hurry,
    NodeHeard,
    Prepare,
    Pressed,
    Refused,
    Release,
    Remember,
    Stop,
    Vacate,
)
from services.loader.domain.reports import reported
from services.loader.domain.state import Entry, Holder, Stage, State, Waiter, Wanted
from shared.contracts.loader import instance_of
from shared.errors import Conflict, ShuttingDown, StaleToken, ThawError

REMEMBERED_RELEASES = 1024
LOST_AFTER_S = 10.0
MISSING_FOR_S = 3.0
"""A nodeagent that has just restarted may send a status or two before it has found its engines again."""
Decision = tuple[State, tuple[Effect, ...]]


def decide(state: State, event: Event, now: float) -> Decision:
    """The state after `event`, and what is to be done. `now`: monotonic seconds."""
    match event:
        case Prepare() | Attach():
            return _wanted(state, event, now)
        case Release():
            return _release(state, event, now)
        case Abandoned():
            return _abandoned(state, event.reply), ()
        case NodeHeard():
            return _node_heard(state, event, now)
        case Adopt():
            return _adopt(state, event, now), ()
        case Adopted():
            return _adopted(state, event)
        case Pressed():
            return room.trim(state, event.nbytes)
        case Stop():
            return _stop(state)
        case _:
            return reported(state, event, now)


# -- prepare and attach ------------------------------------------------------------------------------------------------------------


def _wanted(state: State, event: Prepare | Attach, now: float) -> Decision:
    if (objection := _objection(state, event)) is not None:
        return state, (Refused(event.reply, objection.body()),)
    if isinstance(event, Prepare):
        state = replace(state, epoch=max(state.epoch, event.token >> 32))
    state, effects = _join(state, event, now)
    if isinstance(event, Prepare):
        return state, (*effects, Accepted(event.reply))
    entry = state.entries[event.card.info.revision]
    if entry.stage is Stage.FAILED and entry.error is not None:
        return state, (*effects, Refused(event.reply, entry.error))
    if reached(entry, event.until):
        return state, (*effects, Attached(event.reply, entry.weights_id))
    waiter = Waiter(event.reply, event.instance_id, event.until)
    return put(state, replace(entry, waiters=(*entry.waiters, waiter))), effects


def _objection(state: State, event: Prepare | Attach) -> ThawError | None:
    if state.closing:
        return ShuttingDown("the loader is shutting down")
    if isinstance(event, Prepare) and event.token >> 32 < state.epoch:
        return StaleToken(f"prepare of {event.instance_id} is from leader epoch {event.token >> 32}; {state.epoch} was seen")
    if event.instance_id in state.released or instance_of(event.instance_id) in state.released:
        return StaleToken(f"instance {event.instance_id} has released its weights; a new start has a new instance id")
    held = state.held_by(event.instance_id)
    if held is not None and held.weights_id != event.card.info.revision:
        return Conflict(f"instance {event.instance_id} holds the weights of {held.model} already")
    return None


def _join(state: State, event: Prepare | Attach, now: float) -> Decision:
    card, weights_id = event.card, event.card.info.revision
    entry = state.entries.get(weights_id)
    holder = _holder(entry, event, now)
    wanted = Wanted(card, event.traceparent, holder.background)
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
        return put(state, replace(entry, again=entry.again or wanted)), ()
    if entry.stage is Stage.CACHED:
        entry = replace(entry, stage=Stage.COMPLETE)
        state = replace(state, chunks=chunks.mark(state.chunks, entry.run, cached=False))
    effects: tuple[Effect, ...] = ()
    if entry.stage is Stage.COMPLETE and not known and not holder.local:
        effects = (Remember(weights_id),)
    elif entry.stage in (Stage.LOADING, Stage.INDEXED) and hurried:
        effects = (Hurry(entry.run),)
    return put(state, entry), effects


def _holder(entry: Entry | None, event: Prepare | Attach, now: float) -> Holder:
    before = entry.holders.get(event.instance_id) if entry is not None else None
    if isinstance(event, Prepare):
        return Holder(now, background=event.background)
    background = event.background
    if background is None:
        background = before.background if before is not None else False
    return Holder(now, local=event.local, background=background)


# -- release -----------------------------------------------------------------------------------------------------------------------


def _release(state: State, event: Release, now: float) -> Decision:
    if event.instance_id not in state.released:
        state = replace(state, released=(*state.released, event.instance_id)[-REMEMBERED_RELEASES:])
    state, effects = _let_adapters_go(state, event.instance_id, now)
    entry = state.held_by(event.instance_id)
    if entry is not None:
        state, more = _let_go(state, entry, event.instance_id, now)
        effects = (*effects, *more)
    else:
        entry = next((e for e in state.entries.values() if event.instance_id in e.released_by), None)
    left = state.entries.get(entry.weights_id) if entry is not None else None
    if left is not None and left.stage is Stage.LEAVING and event.instance_id in left.released_by:
        return put(state, replace(left, releases=(*left.releases, event.reply))), effects
    cached = left.total_bytes if left is not None and left.stage is Stage.CACHED else 0
    return state, (*effects, Freed(event.reply, 0, cached))


def _let_adapters_go(state: State, instance_id: str, now: float) -> Decision:
    """What an instance's engine holds for its adapters goes with it."""
    effects: list[Effect] = []
    for holder in [h for e in state.entries.values() for h in e.holders if h != instance_id and instance_of(h) == instance_id]:
        held = state.held_by(holder)
        if held is not None:
            state, more = _let_go(state, held, holder, now)
            effects.extend(more)
    return state, tuple(e for e in effects if not isinstance(e, Remember) or _is_whole(state, e.weights_id))


def _let_go(state: State, entry: Entry, instance_id: str, now: float) -> Decision:
    """`instance_id` no longer holds `entry`; after the last one it is cached, or leaves."""
    gone = StaleToken(f"instance {instance_id} has released its weights").body()
    refused = tuple(Refused(w.reply, gone) for w in entry.waiters if w.instance_id == instance_id)
    entry = replace(
        entry,
        holders={k: v for k, v in entry.holders.items() if k != instance_id},
        waiters=tuple(w for w in entry.waiters if w.instance_id != instance_id),
        used_at=now,
    )
    if entry.holders:
        remember = (Remember(entry.weights_id),) if entry.stage is Stage.COMPLETE else ()
        return put(state, entry), (*refused, *remember)
    if entry.stage is Stage.FAILED:
        return drop(state, entry.weights_id), refused
    if entry.stage is Stage.LEAVING:  # it had come back while the weights were leaving, and goes again
        return put(state, replace(entry, again=None, released_by=entry.released_by | {instance_id})), refused
    if entry.stage is not Stage.COMPLETE:
        entry = replace(entry, stage=Stage.LEAVING, wants=0, released_by=frozenset({instance_id}))
        return put(state, entry), (*refused, CancelRun(entry.weights_id, entry.run))
    state, effects = _unheld(state, entry, instance_id)
    return state, (*refused, *effects)


def _unheld(state: State, entry: Entry, instance_id: str) -> Decision:
    if room.may_cache(state, entry) and not state.closing:
        state = replace(state, chunks=chunks.mark(state.chunks, entry.run, cached=True))
        state, trimmed = room.trim(put(state, replace(entry, stage=Stage.CACHED)))
        return state, (Remember(entry.weights_id), *trimmed)
    entry = replace(entry, stage=Stage.LEAVING, released_by=frozenset({instance_id}))
    return room.leave(put(state, entry), entry, room.spare_room(state), told=True)


def _abandoned(state: State, reply: int) -> State:
    for entry in state.entries.values():
        if reply in entry.releases or any(w.reply == reply for w in entry.waiters):
            waiters = tuple(w for w in entry.waiters if w.reply != reply)
            return put(state, replace(entry, waiters=waiters, releases=tuple(r for r in entry.releases if r != reply)))
    return state


# -- the nodeagent, earlier and later lives ---------------------------------------------------------------------------------------


def _node_heard(state: State, event: NodeHeard, now: float) -> Decision:
    """Let go for holders that the nodeagent has not known for a while: their engines are gone and nobody will release them."""
    effects: list[Effect] = []
    for weights_id in tuple(state.entries):
        entry = state.entries.get(weights_id)
        if entry is None:  # it has left for others that came to be cached just now
            continue
        holders = {i: h if h.local else _seen(i, h, event, now) for i, h in entry.holders.items()}
        if holders != entry.holders:
            state = put(state, replace(entry, holders=holders))
        for instance_id in _lost(holders, now):
            state, more = _let_go(state, state.entries[weights_id], instance_id, now)
            effects.extend(more)
    # Where the last holders are lost together, those before the last leave nothing to remember.
    return state, tuple(e for e in effects if not isinstance(e, Remember) or _is_whole(state, e.weights_id))


def _is_whole(state: State, weights_id: str) -> bool:
    entry = state.entries.get(weights_id)
    return entry is not None and entry.stage in (Stage.COMPLETE, Stage.CACHED)


def _seen(instance_id: str, holder: Holder, event: NodeHeard, now: float) -> Holder:
    if instance_of(instance_id) in event.instances:
        return holder if holder.missing is None else replace(holder, missing=None)
    return holder if holder.missing is not None else replace(holder, missing=now)


def _lost(holders: Mapping[str, Holder], now: float) -> list[str]:
    return [
        i for i, h in holders.items() if h.missing is not None and now - h.missing >= MISSING_FOR_S and now - h.since > LOST_AFTER_S
    ]


def _adopt(state: State, event: Adopt, now: float) -> State:
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


def _adopted(state: State, event: Adopted) -> Decision:
    effects: list[Effect] = []
    if event.mapped:
        state, more = room.give_back(state, event.mapped)
        effects.extend(more)
    state, more = room.trim(state)
    effects.extend(more)
    count = min(event.spare, room.spare_room(state))
    if count:
        run = state.runs + 1
        state = replace(state, runs=run, chunks=chunks.fill_spare(state.chunks, run, count))
        gone = state.chunks.doomed[run]
        effects.append(Vacate(run, gone.chunks, 0, gone.keep))
    return state, tuple(effects)


def _stop(state: State) -> Decision:
    error = ShuttingDown("the loader is shutting down").body()
    effects: list[Effect] = []
    state = replace(state, closing=True)
    for entry in tuple(state.entries.values()):
        effects.extend(Refused(w.reply, error) for w in entry.waiters)
        entry = replace(entry, waiters=())
        if entry.stage in (Stage.LOADING, Stage.INDEXED):
            effects.append(CancelRun(entry.weights_id, entry.run))
            entry = replace(entry, stage=Stage.LEAVING, wants=0, holders={})
        elif entry.stage is Stage.LEAVING:
            entry = replace(entry, holders={}, again=None)
        state = put(state, entry)
    return state, tuple(effects)
