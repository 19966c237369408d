"""The least total time in which a device's instances free enough bytes, by unloading or moving
(ServerlessLLM §6.2).

The paper names "a dynamic programming approach to minimize migration time" and gives no recurrence;
this one is ours. Victims 1..n of a device hold s_i bytes. Victim i can move to device d in t(i, d)
seconds (loading its model there, and a·(t_in + t_out) + b to take over the tokens), where F_d bytes
are free. An idle victim is unloaded in `unload_s`. Let T(i, f, u) be the least total time in which
the first i victims free f bytes (counted up to `short`) with u_d bytes taken at each destination:

    T(0, 0, 0) = 0
    T(i, f, u) = min( T(i-1, f, u)                                    i stays
                    , T(i-1, f', u)                 if i is idle       it is unloaded
                    , min over d of T(i-1, f', u - s_i·e_d) + t(i, d)  it moves, while u_d <= F_d )
      with f = min(short, f' + s_i)

The answer is the least T(n, short, u) over all u. Ties: fewer victims first, then the least
recently used. States that another state dominates are dropped, and so are states that cost more
than a complete plan, which keeps the table small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.domain.policies.port import MigrationTarget, Resident

FRONT = 256
"""States kept at each step at most; beyond, the cheapest few of each part of `short`.

Up to 8 victims with one target each this is never reached. With more victims the plan is valid, but
not always optimal.
"""
PARTS = 64


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A victim and its migration targets."""

    key: str
    nbytes: int
    last_used: float = 0.0
    moves: tuple[MigrationTarget, ...] = ()
    unload_s: float | None = None
    """Seconds that unloading it costs; None: it must migrate."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Victims with their destinations (empty: none), and the seconds of all together."""

    moves: tuple[tuple[str, str], ...]
    seconds: float
    freed: int


@dataclass(frozen=True, slots=True)
class _State:
    cost: tuple[float, int, float]
    """Seconds, number of victims, sum of their last uses."""
    freed: int
    used: tuple[int, ...]
    moves: tuple[tuple[str, str], ...]


def least_time(victims: Sequence[EvictionCandidate], short: int) -> EvictionPlan | None:
    """Solve the recurrence above; None: the victims cannot free `short` bytes."""
    devices = sorted({m.device for v in victims for m in v.moves})
    free = {m.device: m.free_bytes for v in victims for m in v.moves}
    at = {d: n for n, d in enumerate(devices)}
    front = [_State((0.0, 0, 0.0), 0, (0,) * len(devices), ())]
    best: _State | None = front[0] if short <= 0 else None
    for victim in sorted(victims, key=lambda v: (v.last_used, v.key)):
        reached = list(front)
        for state in front:
            if victim.unload_s is not None:
                reached.append(_add_victim(state, victim, "", victim.unload_s, state.used))
            for move in victim.moves:
                n = at[move.device]
                taken = state.used[n] + victim.nbytes
                if taken <= free[move.device]:
                    used = (*state.used[:n], taken, *state.used[n + 1 :])
                    reached.append(_add_victim(state, victim, move.device, move.total_s, used))
        for state in reached:
            if state.freed >= short and (best is None or (state.cost, state.moves) < (best.cost, best.moves)):
                best = state
        limit = best
        front = _prune_to_front([s for s in reached if s.freed < short and (limit is None or s.cost < limit.cost)], short)
    return EvictionPlan(best.moves, best.cost[0], best.freed) if best is not None else None


def _add_victim(state: _State, victim: EvictionCandidate, device: str, seconds: float, used: tuple[int, ...]) -> _State:
    total, count, recency = state.cost
    cost = (total + seconds, count + 1, recency + victim.last_used)
    return _State(cost, state.freed + victim.nbytes, used, (*state.moves, (victim.key, device)))


def _prune_to_front(states: list[_State], short: int) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s.cost, -s.freed, s.used, s.moves)):
        freed = min(short, state.freed)
        if not any(min(short, k.freed) >= freed and all(a <= b for a, b in zip(k.used, state.used, strict=True)) for k in kept):
            kept.append(state)
    if len(kept) <= FRONT:
        return kept
    parts: dict[int, list[_State]] = {}
    for state in kept:
        part = parts.setdefault(min(short, state.freed) * PARTS // short, [])
        if len(part) < FRONT // PARTS:
            part.append(state)
    return [s for part in parts.values() for s in part]


def ways_out(resident: Resident) -> tuple[MigrationTarget, ...]:
    if resident.moves or resident.resume_s is None or not resident.move_to:
        return resident.moves
    return (MigrationTarget(resident.move_to, resident.resume_s, resident.nbytes),)
