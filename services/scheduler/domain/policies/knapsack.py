"""The least total time in which a device's instances free enough bytes, by unloading or moving
(ServerlessLLM §6.2).

The paper names "a dynamic programming approach to minimize migration time" and gives no recurrence;
this search is ours. Victims of a device hold s_i bytes. Victim i can move to device d in t(i, d)
seconds (loading its model there, and a·(t_in + t_out) + b to take over the tokens), where F_d bytes
are free. An idle victim is unloaded in `unload_s`. Wanted are the victims, and a way for each, that
free `short` bytes in the least total time while no destination takes more than F_d. Ties: fewer
victims first, then the least recently used.

It is a knapsack with a capacity for each destination, so the search is a branch and bound. Victims
are decided in the order of their least seconds for each byte, with the quickest way first: the
first complete plan is the greedy one. A branch ends if the bytes that it still needs, freed by the
victims that follow at their least seconds for each byte, take longer than the best plan. A table
over bytes and destinations grows with the product of all bytes that destinations can have taken:
it took seconds for 16 victims with 4 destinations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from services.scheduler.domain.policies.port import MigrationTarget

MOST_BRANCHES = 2_000
"""Branches that a search examines at most, in some milliseconds: then the best plan is taken."""
_ROUNDING_S = 1e-9


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


class _Way(NamedTuple):
    """A way to clear a victim from its device.

    Attributes:
        device: The device that it moves to; empty: it is unloaded.
    """

    seconds: float
    device: str


class _Choice(NamedTuple):
    """A victim and its ways, the slowest first."""

    victim: EvictionCandidate
    ways: list[_Way]

    def rank(self) -> tuple[float, float, str]:
        """Return what victims are decided by: their least seconds for each byte first."""
        return self.ways[-1].seconds / self.victim.nbytes, self.victim.last_used, self.victim.key


class _Branch(NamedTuple):
    """A decision on the first `decided` victims."""

    decided: int
    freed: int
    cost: tuple[float, int, float]
    """Seconds, number of victims, sum of their last uses."""
    used: tuple[tuple[str, int], ...]
    """Bytes taken at each destination that has any."""
    moves: tuple[tuple[int, str], ...]
    """Victims by index, with their destinations."""


def least_time(victims: Sequence[EvictionCandidate], short: int) -> EvictionPlan | None:
    """Find the plan of the least total time that frees `short` bytes.

    None: no plan frees them, or none was found in `MOST_BRANCHES`.
    """
    free = {m.device: m.free_bytes for v in victims for m in v.moves}
    ordered = sorted((c for v in victims if (c := _Choice(v, _ways_of(v))).ways and v.nbytes > 0), key=_Choice.rank)
    bound = _Bound(ordered)
    best: _Branch | None = None
    branches = [_Branch(0, 0, (0.0, 0, 0.0), (), ())]
    for _ in range(MOST_BRANCHES):
        if not branches:
            break
        branch = branches.pop()
        if branch.freed >= short:
            if best is None or _rank(branch, ordered) < _rank(best, ordered):
                best = branch
        elif bound.may_improve(branch, short, best):
            branches += _split(branch, ordered[branch.decided], free)
    if best is None:
        return None
    return EvictionPlan(tuple((key, device) for _, key, device in _list_moves(best, ordered)), best.cost[0], best.freed)


def _ways_of(victim: EvictionCandidate) -> list[_Way]:
    """Return the ways of a victim that fit by themselves, the slowest first."""
    ways = [_Way(m.total_s, m.device) for m in victim.moves if victim.nbytes <= m.free_bytes]
    if victim.unload_s is not None:
        ways.append(_Way(victim.unload_s, ""))
    return sorted(ways, reverse=True)


def _rank(branch: _Branch, ordered: Sequence[_Choice]) -> tuple[object, ...]:
    return branch.cost, _list_moves(branch, ordered)


def _list_moves(branch: _Branch, ordered: Sequence[_Choice]) -> list[tuple[float, str, str]]:
    """Return the last use, key and destination of each victim, the least recently used first."""
    return sorted((ordered[i].victim.last_used, ordered[i].victim.key, device) for i, device in branch.moves)


def _split(branch: _Branch, choice: _Choice, free: dict[str, int]) -> list[_Branch]:
    """Decide on the next victim; the last branch is examined first."""
    victim, (seconds, count, recency) = choice.victim, branch.cost
    found = [branch._replace(decided=branch.decided + 1)]  # it stays
    used = dict(branch.used)
    for way in choice.ways:
        taken = used
        if way.device:
            taken = {**used, way.device: used.get(way.device, 0) + victim.nbytes}
            if taken[way.device] > free[way.device]:
                continue
        cost = (seconds + way.seconds, count + 1, recency + victim.last_used)
        moves = (*branch.moves, (branch.decided, way.device))
        found.append(_Branch(branch.decided + 1, branch.freed + victim.nbytes, cost, tuple(taken.items()), moves))
    return found


class _Bound:
    """The least cost at which victims can complete a branch, whatever destinations have taken."""

    def __init__(self, ordered: Sequence[_Choice]) -> None:
        self._bytes = list(accumulate((c.victim.nbytes for c in ordered), initial=0))
        self._seconds = list(accumulate((c.ways[-1].seconds for c in ordered), initial=0.0))
        largest = list(accumulate((c.victim.nbytes for c in reversed(ordered)), max))
        self._largest = largest[::-1]

    def may_improve(self, branch: _Branch, short: int, best: _Branch | None) -> bool:
        """False if no plan of this branch frees `short` bytes, or is better than `best`."""
        at, wanted = branch.decided, self._bytes[branch.decided] + short - branch.freed
        if wanted > self._bytes[-1]:
            return False
        if best is None:
            return True
        last = bisect_left(self._bytes, wanted) - 1  # the victim that is counted in part
        part = (wanted - self._bytes[last]) / (self._bytes[last + 1] - self._bytes[last])
        seconds = self._seconds[last] + part * (self._seconds[last + 1] - self._seconds[last]) - self._seconds[at]
        least = branch.cost[0] + seconds
        if abs(least - best.cost[0]) > _ROUNDING_S:
            return least < best.cost[0]
        return branch.cost[1] - (branch.freed - short) // self._largest[at] <= best.cost[1]
