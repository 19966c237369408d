"""A segment in the pool, as one range of bytes over its chunks."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Protocol

from shared.contracts.segment import PAGE, Extent
from shared.errors import InsufficientMemory
from shared.mapping import coalesce
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import Pages, PoolMemory
from weights.pool.shm import no_room


class Space(Protocol):
    """The memory that pieces are read into.

    Offsets are the segment's; the range of all methods but `write` lies within one chunk.
    """

    def write(self, offset: int, data: memoryview | bytes) -> None: ...
    def copy(self, offset: int, data: memoryview) -> None: ...
    def populate(self, offset: int, length: int, *, huge: bool = False) -> Pages | None: ...
    def is_ready(self, offset: int, length: int) -> bool: ...
    def view(self, offset: int, length: int) -> memoryview: ...


class Region:
    """The memory of one segment: `nbytes` in `chunks` of the pool, in that order.

    Offsets count from the start of the segment. A range given to a method lies within one chunk,
    unless the method says otherwise.
    """

    def __init__(self, pool: PoolMemory, chunks: Sequence[int], nbytes: int) -> None:
        assert (len(chunks) - 1) * CHUNK_BYTES < nbytes <= len(chunks) * CHUNK_BYTES
        self.pool, self.chunks, self.nbytes = pool, tuple(chunks), nbytes

    @property
    def extents(self) -> tuple[Extent, ...]:
        return extents(self.chunks, self.nbytes)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write across chunk boundaries. Raises `InsufficientMemory` if shared memory is full."""
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                room = CHUNK_BYTES - (offset + done) % CHUNK_BYTES
                with view[done : done + room] as part:
                    self.copy(offset + done, part)
                    done += len(part)

    def copy(self, offset: int, data: memoryview) -> None:
        """Write by the descriptor. Raises `InsufficientMemory` if shared memory is full."""
        try:
            self.pool.write(self._at(offset), data)
        except OSError as e:
            raise self._no_room(e) from e

    def populate(self, offset: int, length: int, *, huge: bool = False) -> Pages | None:
        """Have these pages here, huge ones if wanted and granted.

        Raises `InsufficientMemory` if shared memory is full.

        Returns:
            The kind of pages added; None if these bytes had memory.
        """
        try:
            return self.pool.populate(self._at(offset), length, huge=huge)
        except OSError as e:
            raise self._no_room(e) from e

    def read(self, offset: int, into: memoryview) -> int:
        """Read by the descriptor, without mapping anything; returns the bytes read."""
        return os.preadv(self.pool.fd, [into], self._at(offset))

    def is_ready(self, offset: int, length: int) -> bool:
        """True if these bytes have memory that is mapped here."""
        return self.pool.is_ready(self._at(offset), length)

    def view(self, offset: int, length: int) -> memoryview:
        return self.pool.view(self._at(offset), length)

    def discard(self, start: int) -> int:
        """Free the memory of all bytes from `start` on, and return how many bytes that were."""
        freed = 0
        while start < self.nbytes:
            length = min(self.nbytes - start, CHUNK_BYTES - start % CHUNK_BYTES)
            freed += self.pool.discard(self._at(start), -(-length // PAGE) * PAGE)
            start += length
        return freed

    def zap(self, index: int) -> None:
        """Unmap the complete `index`-th chunk: only its readers map it."""
        self.pool.zap(self.chunks[index], min(CHUNK_BYTES, self.nbytes - index * CHUNK_BYTES))

    def zap_all(self) -> None:
        for index in range(len(self.chunks)):
            self.zap(index)

    def _at(self, offset: int) -> int:
        return self.chunks[offset // CHUNK_BYTES] * CHUNK_BYTES + offset % CHUNK_BYTES

    def _no_room(self, error: OSError) -> OSError | InsufficientMemory:
        return no_room(self.nbytes) if error.errno in (errno.ENOSPC, errno.ENOMEM) else error


def extents(chunks: Sequence[int], nbytes: int) -> tuple[Extent, ...]:
    """Return the places of `nbytes` in `chunks` in the pool's file, neighbours joined."""
    ends = [min(CHUNK_BYTES, nbytes - i * CHUNK_BYTES) for i in range(len(chunks))]
    return tuple(coalesce([Extent(offset=c * CHUNK_BYTES, nbytes=n) for c, n in zip(chunks, ends, strict=True)]))
