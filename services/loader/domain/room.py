"""Grant memory to loads, and evict cached weights for them.

`settle(state, room)`, for the loads that want chunks, in order of arrival
 1. memory suffices, what other loads were promised counted, and so do chunks → granted;
 2. evicting everything cached and spare would not suffice → denied;
 3. evictions, cancelled loads and chunks being populated will suffice → wait for them;
 4. else evict the least recently used cached weights, pinned ones never; their chunks stay spare
    for the load, unless it is chunks that it lacks and not memory;
 5. nothing is left to evict → free spare chunks of the wrong size, or deny the load.

Chunks can be scarcer than memory: weights take whole ones, and those that a device keeps take
chunks for all their bytes.

`make_ready(state, room)` populates free chunks, a few at a time, while nothing loads and the host
has plenty of memory.

`trim(state)` frees spare chunks beyond the budget, or that the host is short of, then evicts the
least recently used cached weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.loader.domain.effects import Deny, Effect, Grant, RemoveRecord, Vacate
from services.loader.domain.entries import drop, put
from services.loader.domain.state import Entry, Stage, State
from weights.pool import chunks
from weights.pool.chunks import CHUNK_BYTES

PREPARE_AT_ONCE = 8
RESERVED_SHARE = 0.1
"""Share of the host's memory that stays free when chunks are populated for future loads."""
Decision = tuple[State, tuple[Effect, ...]]


def settle(state: State, room: int) -> Decision:
    """Grant chunks to waiting loads, in order of arrival.

    Args:
        room: Bytes of memory free at the last measurement.
    """
    effects: list[Effect] = []
    for entry in sorted((e for e in state.entries.values() if e.wants), key=lambda e: e.run):
        state, more = _serve(state, entry, room)
        effects.extend(more)
        if not more or not isinstance(more[-1], Grant | Deny):
            break  # it waits for evictions, and the later loads wait with it
    else:
        state, trimmed = trim(state)
        effects.extend(trimmed)
    return state, tuple(effects)


def _serve(state: State, entry: Entry, room: int) -> Decision:
    table = state.chunks
    if entry.device is None:
        granted = chunks.take(table, entry.run, entry.wants)
    else:
        granted = chunks.take_sparse(table, entry.run, entry.total_bytes, entry.wants)
    free = room - sum_promised(state)
    if granted is not None and granted.owned[entry.run].fresh <= free:  # 1
        state = put(replace(state, chunks=granted), replace(entry, wants=0))
        return state, (Grant(entry.run, granted.owned[entry.run].chunks, entry.device),)
    evictable = list_cached(state)
    gain = sum(e.total_bytes for e in evictable)
    coming = table.leaving_bytes + table.making_bytes + _called_off(state)
    if entry.wants > free + gain + table.spare_bytes + coming:  # 2
        return _deny(state, entry)
    if granted is None:
        return _free_chunks(state, entry, evictable)
    lacking = granted.owned[entry.run].fresh - free - coming
    if lacking <= 0:  # 3
        return state, ()
    effects: list[Effect] = []
    for victim in evictable:  # 4
        if lacking <= 0:
            break
        keep = -(-max(0, lacking) // CHUNK_BYTES)
        state, more = evict(state, victim, keep)
        effects.extend(more)
        lacking -= victim.total_bytes
    if effects or any(not d.is_lost for d in state.chunks.doomed.values()):
        return state, tuple(effects)
    if table.spare:  # 5
        return give_back(state, table.spare)
    return _deny(state, entry)


def _free_chunks(state: State, entry: Entry, evictable: Sequence[Entry]) -> Decision:
    """Evict cached weights until the pool has chunks enough for a load."""
    table = state.chunks
    needed = len(chunks.parts(entry.wants if entry.device is None else entry.total_bytes))
    coming = sum(len(d.chunks) for d in table.doomed.values() if not d.is_lost)
    coming += sum(len(o.chunks) for o in _list_called_off(state))
    lacking = needed - (table.count - len(table.list_taken())) - len(table.spare) - coming
    if lacking > sum(len(table.owned[e.run].chunks) for e in evictable):  # 2
        return _deny(state, entry)
    effects: list[Effect] = []
    for victim in evictable:  # 4
        if lacking <= 0:
            break
        lacking -= len(table.owned[victim.run].chunks)
        state, more = evict(state, victim)
        effects.extend(more)
    if effects or coming:  # 3
        return state, tuple(effects)
    return give_back(state, table.spare) if table.spare else _deny(state, entry)  # 5


def _deny(state: State, entry: Entry) -> Decision:
    return put(state, replace(entry, wants=0)), (Deny(entry.run),)


def sum_promised(state: State) -> int:
    """Bytes that granted loads and chunks being populated will still take.

    A cancelled load counts until it has ended. A load fills the chunks first that had memory.
    """
    filling = (e for e in state.entries.values() if e.stage in (Stage.LOADING, Stage.INDEXED, Stage.LEAVING))
    return state.chunks.making_bytes + sum(
        min(o.fresh, max(0, o.nbytes - max(e.arrived_bytes, e.loaded_bytes if e.device is None else 0)))
        for e in filling
        if (o := state.chunks.owned.get(e.run)) is not None
    )


def _called_off(state: State) -> int:
    """Bytes that cancelled loads free when they end."""
    return sum(o.nbytes for o in _list_called_off(state))


def _list_called_off(state: State) -> list[chunks.Owned]:
    """Chunks that cancelled loads free when they end."""
    leaving = (state.chunks.owned.get(e.run) for e in state.entries.values() if e.stage is Stage.LEAVING)
    return [o for o in leaving if o is not None]


def list_cached(state: State) -> list[Entry]:
    """Cached weights that may be evicted, least recently used first."""
    found = [e for e in state.entries.values() if e.stage is Stage.CACHED and not e.pinned]
    return sorted(found, key=lambda e: (e.used_at, e.run))


def may_cache(state: State, entry: Entry) -> bool:
    """True if host memory has all bytes, and the budget holds them beside the pinned ones."""
    if entry.device is not None:
        return False
    pinned = sum(e.total_bytes for e in state.entries.values() if e.stage is Stage.CACHED and e.pinned)
    return entry.total_bytes + pinned <= state.chunks.budget


def evict(state: State, entry: Entry, keep: int = 0) -> Decision:
    """Evict cached weights; up to `keep` of their chunks stay spare."""
    return reclaim(drop(state, entry.key), entry, keep)


def reclaim(state: State, entry: Entry, keep: int = 0, *, notify: bool = False) -> Decision:
    """Reclaim the chunks of `entry`.

    Args:
        notify: Report `Reclaimed` too.
    """
    table = chunks.doom(state.chunks, entry.run, keep)
    gone = table.doomed[entry.run]
    weights_id = entry.weights_id if notify else None
    vacate = Vacate(entry.run, gone.chunks, gone.nbytes, gone.keep, weights_id)
    removed = (RemoveRecord(entry.weights_id),) if entry.device is None else ()
    return replace(state, chunks=table), (*removed, vacate)


def spare_room(state: State) -> int:
    """Return the number of whole spare chunks that the budget still has room for."""
    return max(0, state.chunks.budget - state.chunks.charged) // CHUNK_BYTES


def trim(state: State, short: int = 0) -> Decision:
    """Bring the charged bytes within the budget.

    Args:
        short: Bytes to free at least, if possible, counting evictions in progress.
    """
    effects: list[Effect] = []
    # Chunks that become spare later are counted then: no weights are evicted for them.
    over = max(state.chunks.cached_bytes + state.chunks.spare_bytes - state.chunks.budget, short - state.chunks.leaving_bytes)
    drop: list[int] = []
    for chunk, nbytes in sorted(state.chunks.spare.items(), reverse=True):
        if over <= 0:
            break
        drop.append(chunk)
        over -= nbytes
    if drop:
        state, more = give_back(state, drop)
        effects.extend(more)
    for victim in list_cached(state):
        if over <= 0:
            break
        state, more = evict(state, victim)
        effects.extend(more)
        over -= victim.total_bytes
    return state, tuple(effects)


def make_ready(state: State, room: int) -> Decision:
    """Choose the next chunks to populate as spare ones, if any are wanted."""
    table = state.chunks
    if state.closing or state.is_loading:
        return state, ()
    plenty = room - sum_promised(state) - int(table.count * CHUNK_BYTES * RESERVED_SHARE)
    count = min(state.ready - len(table.spare) - table.coming, spare_room(state), plenty // CHUNK_BYTES, PREPARE_AT_ONCE)
    if count <= 0:
        return state, ()
    run = state.runs + 1
    filling = chunks.fill_spare(table, run, count)
    coming = filling.doomed[run]
    if not coming.chunks:
        return state, ()
    return replace(state, runs=run, chunks=filling), (Vacate(run, coming.chunks, 0, coming.keep),)


def give_back(state: State, which: Iterable[int]) -> Decision:
    """Free spare chunks; chunks without an owner are free once no process maps them."""
    run = state.runs + 1
    table = chunks.doom_loose(state.chunks, run, which)
    gone = table.doomed[run]
    return replace(state, runs=run, chunks=table), (Vacate(run, gone.chunks, gone.nbytes, 0),)
