"""Track ownership of the pool's chunks (ADR 0012).

Only the functions of this module change the table, which has values only. A chunk is at any time in
exactly one state:

- free: no memory
- spare: memory without content
- owned by one load run: filling, held or cached, as the run's entry says
- doomed: released by its owner; not reused before it is proved that no process maps it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Owned:
    """Chunks of one load run.

    Attributes:
        nbytes: Bytes of weights in `chunks`, in order; the last chunk may be partial.
        fresh: Bytes of them without memory when they were taken.
        cached: No instance holds them.
    """

    chunks: tuple[int, ...]
    nbytes: int
    fresh: int = 0
    cached: bool = False


@dataclass(frozen=True)
class Doomed:
    """Released chunks.

    Attributes:
        keep: How many of the first become spare rather than free.
        is_lost: Freeing them has failed. They stay unused.
    """

    chunks: tuple[int, ...]
    nbytes: int
    keep: int = 0
    is_lost: bool = False


@dataclass(frozen=True)
class Chunks:
    """The chunk table.

    Attributes:
        count: All chunks.
        budget: Bytes that spare and cached chunks may take together.
        spare: Bytes of memory by chunk.
        owned: By a number of the owner's.
        doomed: By a number of the owner's.
    """

    count: int = 0
    budget: int = 0
    spare: Mapping[int, int] = field(default_factory=dict)
    owned: Mapping[int, Owned] = field(default_factory=dict)
    doomed: Mapping[int, Doomed] = field(default_factory=dict)

    @property
    def cached_bytes(self) -> int:
        return sum(o.nbytes for o in self.owned.values() if o.cached)

    @property
    def spare_bytes(self) -> int:
        return sum(self.spare.values())

    @property
    def charged(self) -> int:
        """Bytes charged to the budget, chunks becoming spare included."""
        return self.cached_bytes + self.spare_bytes + self.coming * CHUNK_BYTES

    @property
    def coming(self) -> int:
        """Number of chunks becoming spare."""
        return sum(d.keep for d in self.doomed.values())

    @property
    def leaving_bytes(self) -> int:
        """Bytes that loads wait for: doomed, and not yet proved unmapped."""
        return sum(d.nbytes for d in self.doomed.values() if not d.is_lost)

    @property
    def lost_bytes(self) -> int:
        """Bytes that could not be freed."""
        return sum(d.nbytes for d in self.doomed.values() if d.is_lost)

    @property
    def making_bytes(self) -> int:
        """Bytes of chunks being populated, which will be spare."""
        return sum(d.keep * CHUNK_BYTES for d in self.doomed.values() if not d.nbytes)

    def list_taken(self) -> frozenset[int]:
        """Every chunk that has, or may have, memory."""
        owned = (o.chunks for o in self.owned.values())
        doomed = (d.chunks for d in self.doomed.values())
        return frozenset(self.spare).union(*owned, *doomed)


def parts(nbytes: int) -> tuple[int, ...]:
    """Bytes of each chunk that weights of `nbytes` take."""
    whole, rest = divmod(nbytes, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest else ())


def take(table: Chunks, owner: int, nbytes: int) -> Chunks | None:
    """Give `owner` chunks for `nbytes`: spare ones first, then the lowest free ones.

    A spare chunk with more memory than its part needs is not taken: the status would report less
    than is in use.

    Returns:
        The chunks afterwards; None: the pool has too few.
    """
    assert owner not in table.owned
    spare, taken = sorted(table.spare), table.list_taken()
    free = (c for c in range(table.count) if c not in taken)
    chosen: list[int] = []
    for need in parts(nbytes):
        fitting = next((c for c in spare if table.spare[c] <= need), None)
        if fitting is not None:
            spare.remove(fitting)
        chunk = fitting if fitting is not None else next(free, None)
        if chunk is None:
            return None
        chosen.append(chunk)
    ready = sum(table.spare.get(c, 0) for c in chosen)
    left = {c: b for c, b in table.spare.items() if c not in chosen}
    return replace(table, spare=left, owned={**table.owned, owner: Owned(tuple(chosen), nbytes, nbytes - ready)})


def take_sparse(table: Chunks, owner: int, nbytes: int, needed: int) -> Chunks | None:
    """Give `owner` free chunks for a range of `nbytes`, of which only `needed` get memory.

    None if the pool has too few.
    """
    assert owner not in table.owned
    taken = table.list_taken()
    chosen = tuple(c for c in range(table.count) if c not in taken)[: len(parts(nbytes))]
    if len(chosen) < len(parts(nbytes)):
        return None
    return replace(table, owned={**table.owned, owner: Owned(chosen, needed, needed)})


def shrink(table: Chunks, owner: int, nbytes: int) -> Chunks:
    """Keep only `nbytes` of the owner's memory: the rest was given back."""
    return replace(table, owned={**table.owned, owner: replace(table.owned[owner], nbytes=nbytes, fresh=0)})


def adopt(table: Chunks, owner: int, chunks: tuple[int, ...], nbytes: int, *, cached: bool) -> Chunks:
    """Add chunks of an earlier loader, whose content is known and which have no owner."""
    assert table.list_taken().isdisjoint(chunks)
    return replace(table, owned={**table.owned, owner: Owned(chunks, nbytes, cached=cached)})


def mark(table: Chunks, owner: int, *, cached: bool) -> Chunks:
    """Set whether instances hold the owner's weights, or they are cached.

    Cached weights are charged to the budget.
    """
    return replace(table, owned={**table.owned, owner: replace(table.owned[owner], cached=cached)})


def doom(table: Chunks, owner: int, keep: int = 0) -> Chunks:
    """Release the owner's chunks; `vacate` follows when no process maps them.

    Only whole chunks are kept.
    """
    gone = table.owned[owner]
    keep = min(keep, gone.nbytes // CHUNK_BYTES)
    owned = {k: v for k, v in table.owned.items() if k != owner}
    return replace(table, owned=owned, doomed={**table.doomed, owner: Doomed(gone.chunks, gone.nbytes, keep)})


def doom_loose(table: Chunks, number: int, chunks: Iterable[int]) -> Chunks:
    """Release spare chunks, or chunks without an owner that some process maps."""
    loose = tuple(sorted(chunks))
    nbytes = sum(table.spare.get(c, CHUNK_BYTES) for c in loose)
    spare = {c: b for c, b in table.spare.items() if c not in loose}
    return replace(table, spare=spare, doomed={**table.doomed, number: Doomed(loose, nbytes)})


def fill_spare(table: Chunks, number: int, count: int) -> Chunks:
    """Choose up to `count` free chunks to become spare."""
    taken = table.list_taken()
    chosen = tuple(c for c in range(table.count) if c not in taken)[:count]
    return replace(table, doomed={**table.doomed, number: Doomed(chosen, 0, len(chosen))})


def lose(table: Chunks, number: int) -> Chunks:
    """Give doomed chunks up: freeing them has failed. Loads no longer wait for them."""
    gone = table.doomed.get(number)
    if gone is None:
        return table
    return replace(table, doomed={**table.doomed, number: replace(gone, keep=0, is_lost=True)})


def vacate(table: Chunks, number: int, kept: int | None = None) -> Chunks:
    """Finish a release: no process maps the doomed chunks.

    Those kept are spare now, the others free.
    """
    gone = table.doomed.get(number)
    if gone is None:
        return table
    doomed = {k: v for k, v in table.doomed.items() if k != number}
    keep = gone.keep if kept is None else kept
    return replace(table, doomed=doomed, spare={**table.spare, **dict.fromkeys(gone.chunks[:keep], CHUNK_BYTES)})
