"""`decide(state, event, now)`: who holds which weights, which loads run, who is answered when.

Prepare and attach
 1. closing, fenced off, or released before → refused;
 2. the instance holds other weights → refused;
 3. unknown weights, or failed ones and a new holder → a load run;
 4. weights just leaving → a load run as soon as they have left;
 5. else the instance joins; an attach is answered once its index or its last byte is there, with the run's error if it failed.

Release
 6. others hold them → nothing is freed;
 7. the last holder of a running load → the run is called off; of a complete segment → it is removed; answered when memory is free.

A report of a run other than the entry's own is stale and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.loader.domain.events import (
    Abandoned,
    Accepted,
    Adopt,
    Attach,
    Attached,
    CancelRun,
    Completed,
    Effect,
    Event,
    Failed,
    Fetched,
    Freed,
    Indexed,
    Left,
    NodeHeard,
    Prepare,
    Progressed,
    Refused,
    Release,
    Remember,
    RemoveSegment,
    StartRun,
    Stop,
)
from services.loader.domain.state import Entry, Holder, Stage, State, Until, Waiter, Wanted
from shared.contracts.loader import instance_of
from shared.errors import Conflict, ShuttingDown, StaleToken, ThawError

REMEMBERED_RELEASES = 1024
LOST_AFTER_S = 10.0
MISSING_FOR_S = 3.0
"""A nodeagent that has just restarted may send a status or two before it has found its engines again."""
Decision = tuple[State, tuple[Effect, ...]]
Report = Fetched | Indexed | Progressed | Completed | Failed | Left


def decide(state: State, event: Event, now: float) -> Decision:
    """The state after `event`, and what is to be done. `now`: monotonic seconds."""
    match event:
        case Prepare() | Attach():
            return _wanted(state, event, now)
        case Release():
            return _release(state, event)
        case Abandoned():
            return _abandoned(state, event.reply), ()
        case NodeHeard():
            return _node_heard(state, event, now)
        case Adopt():
            return _adopt(state, event, now)
        case Stop():
            return _stop(state)
        case _:
            return _reported(state, event)


def _put(state: State, entry: Entry) -> State:
    return replace(state, entries={**state.entries, entry.weights_id: entry})


def _drop(state: State, weights_id: str) -> State:
    return replace(state, entries={k: v for k, v in state.entries.items() if k != weights_id})


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
    if _reached(entry, event.until):
        return state, (*effects, Attached(event.reply, entry.weights_id))
    waiter = Waiter(event.reply, event.instance_id, event.until)
    return _put(state, replace(entry, waiters=(*entry.waiters, waiter))), effects


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
    wanted = Wanted(card, event.traceparent)
    if entry is None:
        return _start(state, Entry(weights_id, card.name, 0, holders={event.instance_id: Holder(now)}), wanted)
    known = event.instance_id in entry.holders
    entry = replace(entry, holders={**entry.holders, event.instance_id: Holder(now)})
    if entry.stage is Stage.FAILED and not known:
        return _start(state, entry, wanted)
    if entry.stage is Stage.LEAVING:
        entry = replace(entry, again=entry.again or wanted)
    remember = () if known or entry.stage is not Stage.COMPLETE else (Remember(weights_id),)
    return _put(state, entry), remember


def _start(state: State, entry: Entry, wanted: Wanted) -> Decision:
    """A new run for `entry`; its holders and waiters stay, all else begins afresh."""
    run = state.runs + 1
    entry = Entry(entry.weights_id, wanted.card.name, run, holders=entry.holders, waiters=entry.waiters)
    return _put(replace(state, runs=run), entry), (StartRun(entry.weights_id, run, wanted.card, wanted.traceparent),)


def _reached(entry: Entry, until: Until) -> bool:
    return entry.stage is Stage.COMPLETE or (entry.stage is Stage.INDEXED and until == "index")


def _answered(entry: Entry) -> tuple[Entry, tuple[Effect, ...]]:
    """Answer the waiters whose wait is over."""
    over = tuple(w for w in entry.waiters if _reached(entry, w.until))
    left = tuple(w for w in entry.waiters if w not in over)
    return replace(entry, waiters=left), tuple(Attached(w.reply, entry.weights_id) for w in over)


# -- release -----------------------------------------------------------------------------------------------------------------------


def _release(state: State, event: Release) -> Decision:
    if event.instance_id not in state.released:
        state = replace(state, released=(*state.released, event.instance_id)[-REMEMBERED_RELEASES:])
    state, adapters = _let_adapters_go(state, event.instance_id)
    entry = state.held_by(event.instance_id)
    if entry is not None:
        state, effects = _let_go(state, entry, event.instance_id)
    else:
        entry, effects = next((e for e in state.entries.values() if event.instance_id in e.released_by), None), ()
    effects = (*(e for e in adapters if not isinstance(e, Remember) or _is_complete(state, e.weights_id)), *effects)
    leaving = state.entries.get(entry.weights_id) if entry is not None else None
    if leaving is None or event.instance_id not in leaving.released_by:
        return state, (*effects, Freed(event.reply, 0))
    return _put(state, replace(leaving, releases=(*leaving.releases, event.reply))), effects


def _let_adapters_go(state: State, instance_id: str) -> Decision:
    """What an instance's engine has loaded for its adapters goes with it."""
    effects: list[Effect] = []
    for weights_id, known in tuple(state.entries.items()):
        for holder in known.holders:
            if holder != instance_id and instance_of(holder) == instance_id:
                state, more = _let_go(state, state.entries[weights_id], holder)
                effects.extend(more)
    return state, tuple(effects)


def _let_go(state: State, entry: Entry, instance_id: str) -> Decision:
    """`instance_id` no longer holds `entry`; the last one makes it leave."""
    gone = StaleToken(f"instance {instance_id} has released its weights").body()
    refused = tuple(Refused(w.reply, gone) for w in entry.waiters if w.instance_id == instance_id)
    entry = replace(
        entry,
        holders={k: v for k, v in entry.holders.items() if k != instance_id},
        waiters=tuple(w for w in entry.waiters if w.instance_id != instance_id),
    )
    if entry.holders:
        remember = (Remember(entry.weights_id),) if entry.stage is Stage.COMPLETE else ()
        return _put(state, entry), (*refused, *remember)
    if entry.stage is Stage.FAILED:
        return _drop(state, entry.weights_id), refused
    if entry.stage is Stage.LEAVING:  # it had come back while the weights were leaving, and goes again
        return _put(state, replace(entry, again=None, released_by=entry.released_by | {instance_id})), refused
    end: Effect = CancelRun(entry.weights_id, entry.run)
    if entry.stage is Stage.COMPLETE:
        end = RemoveSegment(entry.weights_id, entry.run, entry.segment)
    return _put(state, replace(entry, stage=Stage.LEAVING, released_by=frozenset({instance_id}))), (*refused, end)


def _abandoned(state: State, reply: int) -> State:
    for entry in state.entries.values():
        if reply in entry.releases or any(w.reply == reply for w in entry.waiters):
            waiters = tuple(w for w in entry.waiters if w.reply != reply)
            return _put(state, replace(entry, waiters=waiters, releases=tuple(r for r in entry.releases if r != reply)))
    return state


# -- the nodeagent, earlier and later lives ---------------------------------------------------------------------------------------


def _node_heard(state: State, event: NodeHeard, now: float) -> Decision:
    """Let go for holders that the nodeagent has not known for a while: their engines are gone and nobody will release them."""
    effects: list[Effect] = []
    for weights_id in tuple(state.entries):
        entry = state.entries[weights_id]
        holders = {i: _seen(i, h, event, now) for i, h in entry.holders.items()}
        if holders != entry.holders:
            state = _put(state, replace(entry, holders=holders))
        for instance_id in _lost(holders, now):
            state, more = _let_go(state, state.entries[weights_id], instance_id)
            effects.extend(more)
    # Where the last holders are lost together, those before the last leave nothing to remember.
    return state, tuple(e for e in effects if not isinstance(e, Remember) or _is_complete(state, e.weights_id))


def _is_complete(state: State, weights_id: str) -> bool:
    entry = state.entries.get(weights_id)
    return entry is not None and entry.stage is Stage.COMPLETE


def _seen(instance_id: str, holder: Holder, event: NodeHeard, now: float) -> Holder:
    if instance_of(instance_id) in event.instances:
        return holder if holder.missing is None else replace(holder, missing=None)
    return holder if holder.missing is not None else replace(holder, missing=now)


def _lost(holders: Mapping[str, Holder], now: float) -> list[str]:
    return [
        i for i, h in holders.items() if h.missing is not None and now - h.missing >= MISSING_FOR_S and now - h.since > LOST_AFTER_S
    ]


def _adopt(state: State, event: Adopt, now: float) -> Decision:
    run = state.runs + 1
    entry = Entry(
        event.weights_id,
        event.model,
        run,
        Stage.COMPLETE,
        event.segment,
        event.directory,
        event.total_bytes,
        event.total_bytes,
        holders={i: Holder(now) for i in event.holders},
    )
    return _put(replace(state, runs=run), entry), ()


def _stop(state: State) -> Decision:
    error = ShuttingDown("the loader is shutting down").body()
    effects: list[Effect] = []
    state = replace(state, closing=True)
    for entry in tuple(state.entries.values()):
        effects.extend(Refused(w.reply, error) for w in entry.waiters)
        entry = replace(entry, waiters=())
        if entry.stage in (Stage.LOADING, Stage.INDEXED):
            effects.append(CancelRun(entry.weights_id, entry.run))
            entry = replace(entry, stage=Stage.LEAVING, holders={})
        elif entry.stage is Stage.LEAVING:
            entry = replace(entry, holders={}, again=None)
        state = _put(state, entry)
    return state, tuple(effects)


# -- reports of runs ---------------------------------------------------------------------------------------------------------------


def _reported(state: State, event: Report) -> Decision:
    entry = state.entries.get(event.weights_id)
    if entry is None or entry.run != event.run:
        return state, ()
    if entry.stage is Stage.LEAVING:
        return _reported_leaving(state, entry, event)
    if entry.stage in (Stage.COMPLETE, Stage.FAILED):  # its run has ended
        return state, ()
    effects: tuple[Effect, ...] = ()
    match event:
        case Fetched():
            entry = replace(entry, fetched_bytes=event.fetched)
        case Indexed():
            entry, effects = _answered(
                replace(entry, stage=Stage.INDEXED, segment=event.segment, directory=event.directory, total_bytes=event.total_bytes)
            )
        case Progressed():
            entry = replace(entry, loaded_bytes=min(max(entry.loaded_bytes, event.loaded), entry.total_bytes))
        case Completed():
            entry, effects = _answered(replace(entry, stage=Stage.COMPLETE, loaded_bytes=entry.total_bytes))
            effects = (Remember(entry.weights_id), *effects)
        case Failed():
            effects = tuple(Refused(w.reply, event.error) for w in entry.waiters)
            entry = replace(entry, stage=Stage.FAILED, error=event.error, segment="", loaded_bytes=0, waiters=())
        case Left():
            return state, ()
    return _put(state, entry), effects


def _reported_leaving(state: State, entry: Entry, event: Report) -> Decision:
    match event:
        case Completed():  # the calling off came too late
            return state, (RemoveSegment(entry.weights_id, entry.run, entry.segment),)
        case Indexed():
            return _put(state, replace(entry, segment=event.segment)), ()
        case Failed():
            freed = 0
        case Left():
            freed = event.freed
        case _:
            return state, ()
    told = tuple(Freed(reply, freed) for reply in entry.releases)
    if entry.again is None:
        return _drop(state, entry.weights_id), told
    state, started = _start(state, entry, entry.again)
    return state, (*told, *started)
