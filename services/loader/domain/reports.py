"""Reports of load runs and of the reclaimer."""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain import arenas, room
from services.loader.domain.effects import Effect, Freed, Refused, RemoveRecord, WriteRecord
from services.loader.domain.entries import answer_waiters, drop, put, start
from services.loader.domain.events import (
    Completed,
    Ended,
    Failed,
    Fetched,
    Indexed,
    LaidOut,
    Progressed,
    Reclaimed,
    Vacated,
    VacateFailed,
)
from services.loader.domain.state import Entry, Stage, State
from weights.pool import chunks

Decision = tuple[State, tuple[Effect, ...]]
Report = Fetched | LaidOut | Indexed | Progressed | Completed | Failed | Ended | Reclaimed


def apply_report(state: State, event: Report | Vacated | VacateFailed, now: float) -> Decision:
    if isinstance(event, VacateFailed):
        return room.settle(replace(state, chunks=chunks.lose(state.chunks, event.run)), event.room)
    if isinstance(event, Vacated):
        gone = state.chunks.doomed.get(event.run)
        state, effects = room.settle(replace(state, chunks=chunks.vacate(state.chunks, event.run, event.kept)), event.room)
        if gone is None or gone.nbytes or effects or event.kept is not None:
            return state, effects
        return room.make_ready(state, event.room)
    entry = state.of_run(event.run)
    if entry is None or entry.weights_id != event.weights_id:
        return state, ()
    if entry.stage is Stage.LEAVING:
        return _apply_while_leaving(state, entry, event)
    if entry.stage not in (Stage.LOADING, Stage.INDEXED):  # its run has ended
        return state, ()
    return _apply_while_loading(state, entry, event, now)


def _apply_while_loading(state: State, entry: Entry, event: Report, now: float) -> Decision:
    effects: tuple[Effect, ...] = ()
    match event:
        case Fetched():
            entry = replace(entry, fetched_bytes=event.fetched)
        case LaidOut():
            return _laid_out(state, entry, event)
        case Indexed():
            entry, effects = answer_waiters(
                replace(entry, stage=Stage.INDEXED, directory=event.directory, total_bytes=event.total_bytes)
            )
            state, opening = arenas.open_wanted(put(state, entry), entry.key)
            return state, (*effects, *opening)
        case Progressed():
            # The last byte counts when the run has ended: a reader that saw it earlier would
            # release its hold, which would cancel the run and discard the weights.
            loaded = max(entry.loaded_bytes, min(event.loaded, entry.total_bytes - 1))
            entry = replace(entry, loaded_bytes=loaded, arrived_bytes=max(entry.arrived_bytes, event.arrived))
        case Completed():
            loaded = entry.total_bytes if event.kept_bytes is None else event.kept_bytes
            # The last bytes may have arrived within the interval of the reports, and no more are
            # to be fetched of weights that a device has a part of.
            fetched = entry.total_bytes if entry.fetched_bytes else 0
            entry = replace(entry, stage=Stage.COMPLETE, loaded_bytes=loaded, fetched_bytes=fetched, used_at=now)
            entry, effects = answer_waiters(entry)
            if event.kept_bytes is None:
                effects = (WriteRecord(entry.key), *effects)
            else:
                state = replace(state, chunks=chunks.shrink(state.chunks, entry.run, event.kept_bytes))
        case Failed():
            return _fail(state, entry, event)
        case Ended() | Reclaimed():
            return state, ()
    return put(state, entry), effects


def _laid_out(state: State, entry: Entry, event: LaidOut) -> Decision:
    """Want memory for all bytes, or for those that the one device of all holders lacks."""
    devices = {h.device for h in entry.holders.values()}
    device = next(iter(devices)) if len(devices) == 1 else None
    if device is None or device not in event.lacking:
        return room.settle(put(state, replace(entry, wants=event.total_bytes)), event.room)
    state = drop(state, entry.key)
    entry = replace(entry, device=device, wants=event.lacking[device], total_bytes=event.total_bytes)
    return room.settle(put(state, entry), event.room)


def _fail(state: State, entry: Entry, event: Failed) -> Decision:
    effects: tuple[Effect, ...] = tuple(Refused(w.reply, event.error) for w in entry.waiters)
    if entry.run in state.chunks.owned:
        state, vacate = room.reclaim(state, entry, room.spare_room(state))
        effects = (*effects, *(e for e in vacate if not isinstance(e, RemoveRecord)))
    failed = replace(arenas.without_arenas(entry), stage=Stage.FAILED, error=event.error, wants=0, loaded_bytes=0, waiters=())
    return put(state, failed), effects


def _apply_while_leaving(state: State, entry: Entry, event: Report) -> Decision:
    match event:
        case Completed() | Failed() | Ended():  # cancelled; a completion arrived too late
            if entry.run in state.chunks.owned:
                state, effects = room.reclaim(state, entry, room.spare_room(state), notify=True)
                return state, tuple(e for e in effects if not isinstance(e, RemoveRecord))
            return _finish_eviction(state, entry, Reclaimed(entry.weights_id, entry.run, 0))
        case Indexed():
            return put(state, replace(entry, total_bytes=event.total_bytes)), ()
        case Progressed():
            return put(state, replace(entry, loaded_bytes=event.loaded, arrived_bytes=event.arrived)), ()
        case Reclaimed():
            return _finish_eviction(state, entry, event)
        case _:
            return state, ()


def _finish_eviction(state: State, entry: Entry, event: Reclaimed) -> Decision:
    replies = tuple(Freed(reply, event.freed, event.kept, event.on_devices) for reply in entry.releases)
    if entry.again is None:
        return drop(state, entry.key), replies
    state, started = start(drop(state, entry.key), entry, entry.again)
    return state, (*replies, *started)
