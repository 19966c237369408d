"""Evict and pack the regions of one memory pool (Tangram §3.2.2).

Eviction is by cost; Partitioned-Gain Packing (Algorithm 1) reduces fragmentation.

The pool is a chain of regions, free or allocated. Algorithm 1 begins with "merge all" (every
allocated region of a subspace may have to move) and splits a subspace at an allocated region, which
then stays (its size is the gain), if the new tensors can be divided over the two halves; where no
split packs, the subspace is final. As printed it misbehaves; so here

- the capacity of a subspace is its *free* bytes (printed: free and allocated ones, so that tensors
  are packed into memory that is not there);
- dividing fails when a tensor exceeds the *larger* remaining capacity (printed: the smaller, so
  that hardly anything is ever divided);
- split points are tried by descending gain (as the text of §3.2.2 has it; printed: in the order of
  the list);
- regions of active models and KV blocks neither move nor are evicted: the pool falls into islands
  between them, and no merging crosses one.

Then only what a final subspace requires is moved: nothing where its tensors fit into free regions
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Region:
    """A memory region.

    Attributes:
        key: The tensor in it; empty: free.
        fixed: It has a tensor of an active model, or KV blocks.
        cost: Cost of evicting it, by Eq. 2.
    """

    size: int
    key: str = ""
    fixed: bool = False
    cost: float = 0.0

    @property
    def movable(self) -> bool:
        return bool(self.key) and not self.fixed


@dataclass(frozen=True, slots=True)
class Packing:
    """A packing, with offsets in bytes.

    Attributes:
        places: Places of the new tensors.
        moves: New offsets of regions that move.
        moved: The bytes of those together.
        bound: M of Algorithm 1, the allocated bytes of the final subspaces that take tensors.
    """

    places: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0
    bound: int = 0


Tensors = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Space:
    """Consecutive regions from `offset` on, none of them fixed."""

    offset: int
    regions: tuple[Region, ...]

    @property
    def free(self) -> int:
        return sum(r.size for r in self.regions if not r.key)

    @property
    def allocated(self) -> int:
        return sum(r.size for r in self.regions if r.key)


def evict(regions: Sequence[Region], need: int) -> list[Region] | None:
    """Evict inactive tensors in ascending cost until `need` bytes are free (stage 1).

    None: too few bytes can be freed. Adjacent free regions are merged.
    """
    short = need - sum(r.size for r in regions if not r.key)
    evicted: set[str] = set()
    for r in sorted((r for r in regions if r.movable), key=lambda r: (r.cost, r.key)):
        if short <= 0:
            break
        evicted.add(r.key)
        short -= r.size
    return remove_evicted(regions, evicted) if short <= 0 else None


def remove_evicted(regions: Sequence[Region], evicted: set[str]) -> list[Region]:
    """Return the regions after those of `evicted` are freed."""
    left: list[Region] = []
    for r in regions:
        kept = r if r.key and r.key not in evicted else Region(r.size)
        if not kept.key and left and not left[-1].key:
            kept = Region(left.pop().size + kept.size)
        left.append(kept)
    return left


def pack(regions: Sequence[Region], tensors: Mapping[str, int]) -> Packing | None:
    """Pack tensors into the pool (stage 2, Algorithm 1).

    None: the islands between fixed regions cannot hold the tensors.
    """
    return _pack_regions(regions, tensors, _partition)


def merge_all(regions: Sequence[Region], tensors: Mapping[str, int]) -> Packing | None:
    """ "GlobalMerge" of §5.4.1: move every allocated region of an island to one end."""
    return _pack_regions(regions, tensors, lambda space, mine: [(space, mine)], needlessly=True)


def _pack_regions(
    regions: Sequence[Region],
    tensors: Mapping[str, int],
    partition: Callable[[_Space, Tensors], list[tuple[_Space, Tensors]]],
    needlessly: bool = False,
) -> Packing | None:
    islands = _islands(regions)
    ordered: Tensors = tuple(sorted(tensors.items(), key=lambda t: (-t[1], t[0])))
    divided = _divide(ordered, [i.free for i in islands])
    if divided is None:
        return None
    places: dict[str, int] = {}
    moves: dict[str, int] = {}
    bound = 0
    for island, mine in zip(islands, divided, strict=True):
        for space, theirs in partition(island, mine):
            if theirs:
                bound += space.allocated
                _settle(space, theirs, places, moves, needlessly)
    sizes = {r.key: r.size for r in regions}
    return Packing(places, moves, sum(sizes[k] for k in moves), bound)


def _islands(regions: Sequence[Region]) -> list[_Space]:
    spaces: list[_Space] = []
    offset, start, inside = 0, 0, list[Region]()
    for r in regions:
        if r.fixed:
            spaces.append(_Space(start, tuple(inside)))
            inside, start = [], offset + r.size
        else:
            inside.append(r)
        offset += r.size
    return [*spaces, _Space(start, tuple(inside))]


def _divide(tensors: Tensors, capacities: Sequence[int]) -> list[Tensors] | None:
    """Divide tensors over bins.

    A tensor goes to the largest remaining capacity, else to the smallest that fits.
    """
    for prefer in (max, min):
        left = list(capacities)
        bins: list[list[tuple[str, int]]] = [[] for _ in capacities]
        for name, size in tensors:
            fitting = [n for n, c in enumerate(left) if c >= size]
            if not fitting:
                break
            n = prefer(fitting, key=lambda n: (left[n], -n))
            bins[n].append((name, size))
            left[n] -= size
        else:
            return [tuple(b) for b in bins]
    return None


def _partition(space: _Space, tensors: Tensors) -> list[tuple[_Space, Tensors]]:
    """Lines 2 to 15, with an explicit list of pending subspaces."""
    pending, final = [(space, tensors)], []
    while pending:
        at, mine = pending.pop()
        halves = _split(at, mine) if mine else None
        if halves is None:
            final.append((at, mine))
        else:
            pending.extend(halves)
    return final


def _split(space: _Space, tensors: Tensors) -> list[tuple[_Space, Tensors]] | None:
    """Split at the largest allocated region at which TryPacking succeeds.

    None: there is no such region.
    """
    points = sorted((n for n, r in enumerate(space.regions) if r.key), key=lambda n: (-space.regions[n].size, n))
    for n in points:
        before, after = space.regions[:n], space.regions[n + 1 :]
        first = _Space(space.offset, before)
        second = _Space(space.offset + sum(r.size for r in before) + space.regions[n].size, after)
        if (divided := _try_packing(tensors, first.free, second.free)) is not None:
            return [(first, divided[0]), (second, divided[1])]
    return None


def _try_packing(tensors: Tensors, first: int, second: int) -> tuple[Tensors, Tensors] | None:
    """Run TryPacking (lines 17 to 27).

    In descending size, each tensor goes to the half with the larger remaining capacity.
    """
    one: list[tuple[str, int]] = []
    two: list[tuple[str, int]] = []
    for tensor in tensors:
        if tensor[1] > max(first, second):
            return None
        if first >= second:
            one.append(tensor)
            first -= tensor[1]
        else:
            two.append(tensor)
            second -= tensor[1]
    return tuple(one), tuple(two)


def _settle(space: _Space, tensors: Tensors, places: dict[str, int], moves: dict[str, int], needlessly: bool) -> None:
    """Place a final subspace's tensors.

    They go to free regions, or behind regions moved to one end.
    """
    if not needlessly and (found := _as_is(space, tensors)) is not None:
        places.update(found)
        return
    downwards, upwards = _slide(space, up=False), _slide(space, up=True)
    sizes = {r.key: r.size for r in space.regions}
    up = sum(sizes[k] for k in upwards) < sum(sizes[k] for k in downwards)
    moves.update(upwards if up else downwards)
    at = space.offset if up else space.offset + space.allocated
    for name, size in tensors:
        places[name] = at
        at += size


def _as_is(space: _Space, tensors: Tensors) -> dict[str, int] | None:
    """Best fit decreasing over the free regions."""
    holes, offset = [], space.offset
    for r in space.regions:
        if not r.key:
            holes.append([r.size, offset])
        offset += r.size
    found = {}
    for name, size in tensors:
        hole = min((h for h in holes if h[0] >= size), default=None)
        if hole is None:
            return None
        found[name] = hole[1]
        hole[0] -= size
        hole[1] += size
    return found


def _slide(space: _Space, *, up: bool) -> dict[str, int]:
    """Return the new offsets when all allocated regions are moved to one end."""
    new = space.offset + (space.free if up else 0)
    old = space.offset
    moves = {}
    for r in space.regions:
        if r.key:
            if new != old:
                moves[r.key] = new
            new += r.size
        old += r.size
    return moves
