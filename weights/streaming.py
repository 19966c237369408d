"""Yield tensors in the order of their bytes while the rest is being read.

The module needs no NATS, no mesh, and little memory.

from weights.streaming import TensorStream
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from weights.binding import bind
from weights.formats.safetensors import TensorEntry
from weights.formats.segment import Layout, lay_out
from weights.load import opened, read_all
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.ring import Ring
from weights.tensors import check_dtypes
from weights.transfer.fill import Filling, PieceReader
from weights.transfer.pieces import Piece, cut
from weights.transfer.reader import DEFAULTS, FilesReader, ReadOptions, ReadStats
from weights.transfer.remote import TierReader

if TYPE_CHECKING:
    import torch

WINDOW_CHUNKS = 4
"""Chunks that may have memory, from the one that is being taken on.

The fewer, the sooner each is used again, from the CPU's cache.
"""


@dataclass(frozen=True)
class _Begun:
    layout: Layout
    ring: Ring
    keeps: bool
    """Memory must not be reused: a tier still reads the loaded bytes."""


class TensorStream:
    """Stream of tensors, each yielded as soon as it is complete, in the files' order.

    The arguments are those of `load_tensors`. Reading starts at once, in threads of its own. It
    ends with `close`, or when the last tensor was yielded: iterate once, and use `with` if you may
    stop early. Reading stays a little ahead of the consumer.

    The stream reuses the memory of tensors without references: a consumer that copies each tensor
    and drops it needs a hundred megabytes for a model of any size. Tensors with references stay
    unchanged. Iterating raises the errors of `load_tensors`.
    """

    def __init__(self, path: Path | str, options: ReadOptions = DEFAULTS, *, rank: int = 0, ranks: int = 1) -> None:
        self._path, self._options, self._rank, self._ranks = path, options, rank, ranks
        self._changed = threading.Condition()
        self._begun: _Begun | None = None
        self._loaded = 0
        self._left = threading.Event()
        self._gone: deque[range] = deque()
        """Chunks of tensors without references.

        Any thread that drops one only appends: it may hold any lock.
        """
        self._executor = ThreadPoolExecutor(1, "tensor-stream", initializer=_unbind)
        self._load = self._executor.submit(self._read)
        self._load.add_done_callback(lambda _: self._notify())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            begun = self._wait(lambda: self._begun is not None)
            needed = _by_chunk(begun.layout)
            free: set[int] = set()
            for start, entry in _in_order(begun.layout):
                begun.ring.want(start, start + entry.nbytes)
                self._wait(lambda: self._loaded >= start + entry.nbytes)  # noqa: B023  # called at once
                yield entry.name, self._tensor(entry, start, begun.ring)
                if not begun.keeps:
                    self._use_again(needed, free, begun)
            begun.ring.want(begun.ring.nbytes, begun.ring.nbytes)
            self._load.result()
        finally:
            self.close()

    def close(self) -> None:
        """Call off what has not been read; returns when no thread reads any more.

        Tensors that were taken stay as they are.
        """
        self._left.set()
        with self._changed:
            begun = self._begun
        if begun is not None:
            begun.ring.close()
        self._executor.shutdown()
        self._begun = None  # tensors keep the memory from now on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the reading threads -----------------------------------------------------------------------

    def _read(self) -> ReadStats:
        with opened(self._path, self._rank, self._ranks) as (checkpoint, tier):
            check_dtypes(checkpoint)
            layout = lay_out(checkpoint, "")
            ring = Ring(layout.total_bytes, window_chunks=WINDOW_CHUNKS if tier is None else None)
            pieces = cut(layout, self._options.chunk_bytes, remote=tier is not None)
            reader: PieceReader = FilesReader(layout.places, pieces, ring, replace(self._options, populate=False))
            if tier is not None:
                reader = TierReader(tier, layout.places, ring)
            with self._changed:
                self._begun = _Begun(layout, ring, keeps=tier is not None)
                self._changed.notify()
            filling = Filling(layout, ring, pieces, cancelled=self._left, on_loaded=self._advance)
            stats = read_all(filling, _InTurn(reader, ring), self._options.threads)
            if tier is not None:
                tier.finish()
        return stats

    def _advance(self, loaded: int) -> None:
        with self._changed:
            self._loaded = max(self._loaded, loaded)
            self._changed.notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    # -- who takes ---------------------------------------------------------------------------------

    def _wait(self, is_loaded: Callable[[], bool]) -> _Begun:
        """Wait until `is_loaded` returns True, or raise the load's error."""
        with self._changed:
            self._changed.wait_for(lambda: self._load.done() or is_loaded())
        if self._load.done():
            self._load.result()
        assert self._begun is not None
        return self._begun

    def _tensor(self, entry: TensorEntry, start: int, ring: Ring) -> torch.Tensor:
        data = ring.view(start, entry.nbytes)
        if entry.nbytes:
            # The tensor's storage refers to this very view, and every view of the tensor to its
            # storage.
            weakref.finalize(data, self._gone.append, _chunks(start, entry.nbytes)).atexit = False
        return bind(entry.name, entry.dtype, entry.shape, data, start)

    def _use_again(self, needed: Counter[int], free: set[int], begun: _Begun) -> None:
        """Release the memory of chunks whose tensors are all gone, once they are loaded.

        Args:
            needed: Number of tensors that use each chunk.
            free: Chunks whose tensors are all gone; those that are released are removed from it.
            begun: The stream that has begun.
        """
        while self._gone:
            chunks = self._gone.popleft()
            needed.subtract(chunks)
            free.update(chunk for chunk in chunks if not needed[chunk])
        with self._changed:
            loaded = self._loaded
        for chunk in [c for c in free if min((c + 1) * CHUNK_BYTES, begun.ring.nbytes) <= loaded]:
            free.remove(chunk)
            begun.ring.release(chunk)


class _InTurn:
    """Reads a piece when its chunk may have memory."""

    def __init__(self, reader: PieceReader, ring: Ring) -> None:
        self._reader, self._ring = reader, ring
        self.stats = reader.stats

    def read(self, piece: Piece) -> None:
        self._ring.enter(piece.target)
        self._reader.read(piece)

    def close(self) -> None:
        self._reader.close()


def _in_order(layout: Layout) -> Iterator[tuple[int, TensorEntry]]:
    """Tensors, each with its first byte."""
    for place in layout.places:
        for entry in sorted(place.file.header.tensors, key=lambda e: e.offset):
            yield place.offset + entry.offset, entry


def _chunks(start: int, nbytes: int) -> range:
    return range(start // CHUNK_BYTES, (start + nbytes - 1) // CHUNK_BYTES + 1)


def _by_chunk(layout: Layout) -> Counter[int]:
    """Number of tensors with bytes in each chunk."""
    return Counter(chunk for start, entry in _in_order(layout) if entry.nbytes for chunk in _chunks(start, entry.nbytes))


def _unbind() -> None:
    """Run on every core that some thread of this process may run on.

    An OpenMP runtime binds the thread that calls it to one of them, and the threads that this one
    starts inherit that: all would read on the core that is to copy meanwhile.
    """
    allowed: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            allowed |= os.sched_getaffinity(int(thread.name))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, allowed)
