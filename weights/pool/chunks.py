"""Who has which chunk of the pool (ADR 0012): a table of values, changed only by the functions here.

A chunk is at any time exactly one of: free (no memory), spare (memory, no content), owned by one load run (filling, held or cached, as the
run's entry says), or doomed (nobody's any more, and not given away before it is proved that no process maps it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Owned:
    """`nbytes` of weights in `chunks`, in order; the last one may be filled in part. `fresh`: bytes of them that had no memory yet when
    they were taken. `cached`: nobody holds them."""

    chunks: tuple[int, ...]
    nbytes: int
    fresh: int = 0
    cached: bool = False


@dataclass(frozen=True)
class Doomed:
    """`keep`: how many of the first chunks become spare rather than free."""

    chunks: tuple[int, ...]
    nbytes: int
    keep: int = 0


@dataclass(frozen=True)
class Chunks:
    """`count` chunks, of which spare and cached ones may take `budget` bytes together. `spare`: bytes of memory by chunk; `owned` and
    `doomed` by a number of the owner's."""

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
        """Bytes that the budget is charged with, chunks on their way to spare included."""
        return self.cached_bytes + self.spare_bytes + self.coming * CHUNK_BYTES

    @property
    def coming(self) -> int:
        """Chunks on their way to spare."""
        return sum(d.keep for d in self.doomed.values())

    @property
    def leaving_bytes(self) -> int:
        """Bytes that others wait for: doomed, and not yet proved unmapped."""
        return sum(d.nbytes for d in self.doomed.values())

    @property
    def making_bytes(self) -> int:
        """Bytes of chunks that are being made ready: memory that is promised, and will be spare."""
        return sum(d.keep * CHUNK_BYTES for d in self.doomed.values() if not d.nbytes)

    def taken(self) -> frozenset[int]:
        """Every chunk that has, or may have, memory."""
        owned = (o.chunks for o in self.owned.values())
        doomed = (d.chunks for d in self.doomed.values())
        return frozenset(self.spare).union(*owned, *doomed)


def parts(nbytes: int) -> tuple[int, ...]:
    """Bytes of each chunk that weights of `nbytes` take."""
    whole, rest = divmod(nbytes, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest else ())


def take(table: Chunks, owner: int, nbytes: int) -> Chunks | None:
    """Give `owner` chunks for `nbytes`: spare ones first, then the lowest free ones. None if the pool has too few.

    A spare chunk with more memory than its part needs is left alone: what is held would be more than what is told.
    """
    assert owner not in table.owned
    spare, taken = sorted(table.spare), table.taken()
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


def adopt(table: Chunks, owner: int, chunks: tuple[int, ...], nbytes: int, *, cached: bool) -> Chunks:
    """Chunks of an earlier loader process, whose content is known. They must be nobody's."""
    assert table.taken().isdisjoint(chunks)
    return replace(table, owned={**table.owned, owner: Owned(chunks, nbytes, cached=cached)})


def mark(table: Chunks, owner: int, *, cached: bool) -> Chunks:
    """Whether instances hold the owner's weights, or the budget is charged with them."""
    return replace(table, owned={**table.owned, owner: replace(table.owned[owner], cached=cached)})


def doom(table: Chunks, owner: int, keep: int = 0) -> Chunks:
    """The owner's chunks are nobody's any more; `vacate` follows when that is proved. Only whole chunks are kept."""
    gone = table.owned[owner]
    keep = min(keep, gone.nbytes // CHUNK_BYTES)
    owned = {k: v for k, v in table.owned.items() if k != owner}
    return replace(table, owned=owned, doomed={**table.doomed, owner: Doomed(gone.chunks, gone.nbytes, keep)})


def doom_loose(table: Chunks, number: int, chunks: Iterable[int]) -> Chunks:
    """Spare chunks to be given back, or chunks that somebody maps and nobody owns."""
    loose = tuple(sorted(chunks))
    nbytes = sum(table.spare.get(c, CHUNK_BYTES) for c in loose)
    spare = {c: b for c, b in table.spare.items() if c not in loose}
    return replace(table, spare=spare, doomed={**table.doomed, number: Doomed(loose, nbytes)})


def fill_spare(table: Chunks, number: int, count: int) -> Chunks:
    """Up to `count` of the free chunks, on their way to spare."""
    taken = table.taken()
    chosen = tuple(c for c in range(table.count) if c not in taken)[:count]
    return replace(table, doomed={**table.doomed, number: Doomed(chosen, 0, len(chosen))})


def vacate(table: Chunks, number: int, kept: int | None = None) -> Chunks:
    """Nobody maps the doomed chunks: those kept are spare now, the others free."""
    gone = table.doomed.get(number)
    if gone is None:
        return table
    doomed = {k: v for k, v in table.doomed.items() if k != number}
    keep = gone.keep if kept is None else kept
    return replace(table, doomed=doomed, spare={**table.spare, **dict.fromkeys(gone.chunks[:keep], CHUNK_BYTES)})
