"""Releases: of a running load, of complete weights, of an abandon request."""

from __future__ import annotations

from dataclasses import replace

from services.loader.domain import arenas, room
from services.loader.domain.effects import CancelRun, Effect, Freed, Refused, WriteRecord
from services.loader.domain.entries import drop, put
from services.loader.domain.events import Release
from services.loader.domain.state import Entry, Stage, State
from shared.contracts.loader import instance_of
from shared.errors import StaleToken
from weights.pool import chunks

REMEMBERED_RELEASES = 1024
Decision = tuple[State, tuple[Effect, ...]]


def release(state: State, event: Release, now: float) -> Decision:
    if event.instance_id not in state.released:
        state = replace(state, released=(*state.released, event.instance_id)[-REMEMBERED_RELEASES:])
    state, effects = _release_lora_adapters(state, event.instance_id, now)
    entry = state.held_by(event.instance_id)
    if entry is not None:
        state, more = release_hold(state, entry, event.instance_id, now, keep=event.keep)
        # The instance's own weights may evict those of its adapters, which were cached just before.
        effects = tuple(e for e in (*effects, *more) if not isinstance(e, WriteRecord) or is_whole(state, e.key))
    else:
        entry = next((e for e in state.entries.values() if event.instance_id in e.released_by), None)
    left = state.entries.get(entry.key) if entry is not None else None
    if left is not None and left.stage is Stage.LEAVING and event.instance_id in left.released_by:
        return put(state, replace(left, releases=(*left.releases, event.reply))), effects
    cached = left.total_bytes if left is not None and left.stage is Stage.CACHED else 0
    if (waiting := arenas.defer_reply(state, event.instance_id, event.reply, cached)) is not None:
        return waiting, effects
    return state, (*effects, Freed(event.reply, 0, cached))


def _release_lora_adapters(state: State, instance_id: str, now: float) -> Decision:
    """Release the LoRA adapters' weights that the instance's engine holds."""
    effects: list[Effect] = []
    for holder in [h for e in state.entries.values() for h in e.holders if h != instance_id and instance_of(h) == instance_id]:
        held = state.held_by(holder)
        if held is not None:
            state, more = release_hold(state, held, holder, now)
            effects.extend(more)
    return state, tuple(e for e in effects if not isinstance(e, WriteRecord) or is_whole(state, e.key))


def release_hold(state: State, entry: Entry, instance_id: str, now: float, *, keep: bool = True) -> Decision:
    """Remove the holder `instance_id`.

    Without holders the entry is cached (if allowed, and `keep`) or evicted.
    """
    gone = StaleToken(f"Instance {instance_id} has released its weights").body()
    refused = tuple(Refused(w.reply, gone) for w in entry.waiters if w.instance_id == instance_id)
    entry = replace(
        entry,
        holders={k: v for k, v in entry.holders.items() if k != instance_id},
        waiters=tuple(w for w in entry.waiters if w.instance_id != instance_id),
        used_at=now,
    )
    if entry.holders:
        remember = (WriteRecord(entry.key),) if entry.stage is Stage.COMPLETE else ()
        state, closing = arenas.close_unused(put(state, entry), entry.key, instance_id)
        return state, (*refused, *remember, *closing)
    if entry.stage is Stage.FAILED:
        return drop(state, entry.key), refused
    if entry.stage is Stage.LEAVING:  # it attached during the eviction, and releases again
        return put(state, replace(entry, again=None, released_by=entry.released_by | {instance_id})), refused
    if entry.stage is not Stage.COMPLETE:
        entry = replace(entry, stage=Stage.LEAVING, wants=0, released_by=frozenset({instance_id}))
        return put(state, arenas.without_arenas(entry)), (*refused, CancelRun(entry.weights_id, entry.run))
    state, effects = _without_holders(state, entry, instance_id, keep)
    return state, (*refused, *effects)


def _without_holders(state: State, entry: Entry, instance_id: str, keep: bool) -> Decision:
    if keep and room.may_cache(state, entry) and not state.closing:
        state = replace(state, chunks=chunks.mark(state.chunks, entry.run, cached=True))
        state, closing = arenas.close_unused(put(state, replace(entry, stage=Stage.CACHED)), entry.key, instance_id)
        state, trimmed = room.trim(state)  # among weights used at the same moment any may be evicted, these too
        remember = (WriteRecord(entry.key),) if is_whole(state, entry.key) else ()
        return state, (*remember, *closing, *trimmed)
    entry = arenas.without_arenas(replace(entry, stage=Stage.LEAVING, released_by=frozenset({instance_id})))
    return room.reclaim(put(state, entry), entry, room.spare_room(state), notify=True)


def abandon(state: State, reply: int) -> State:
    """Drop the requests whose caller no longer waits for `reply`."""
    state = arenas.abandon(state, reply)
    for entry in state.entries.values():
        if reply in entry.releases or any(w.reply == reply for w in entry.waiters):
            waiters = tuple(w for w in entry.waiters if w.reply != reply)
            return put(state, replace(entry, waiters=waiters, releases=tuple(r for r in entry.releases if r != reply)))
    return state


def is_whole(state: State, key: str) -> bool:
    entry = state.entries.get(key)
    return entry is not None and entry.stage in (Stage.COMPLETE, Stage.CACHED)
