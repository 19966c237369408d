"""Read pieces of a load from a remote tier, straight into the pool.

A tier with a cache also writes them to the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from shared.errors import CheckpointInvalid, InvalidModel, Unavailable
from weights.formats.segment import Place, pages
from weights.pool.region import Space
from weights.tiers.port import Cancelled, Tier, TierFile
from weights.transfer.pieces import Piece
from weights.transfer.reader import ReadStats
from weights.transfer.striping import Fetched, SourceFailed


class TierReader:
    """Reader of the weight files of one load through `tier`.

    The tier may use the region until it is closed.
    """

    def __init__(self, tier: Tier, places: Sequence[Place], region: Space, cancelled: threading.Event | None = None) -> None:
        """Raises `CheckpointInvalid` if the tier does not list a weight file."""
        self._tier, self._region, self._cancelled = tier, region, cancelled
        self._files = find_files(tier, places)
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def read(self, piece: Piece) -> None:
        self._region.populate(piece.target, pages(piece.length))
        began = time.perf_counter()
        with self._region.view(piece.target, piece.length) as into:
            self._tier.read(self._files[piece.file], piece.offset, into, self._cancelled)
        with self._lock:
            self.stats.add(ReadStats(remote=piece.length, remote_seconds=time.perf_counter() - began))

    def close(self) -> None:
        """No-op: the opener closes the tier, which may still write its copy."""


class StripedTier(Protocol):
    """A tier whose files several places have. Methods as of `Tier`."""

    @property
    def source(self) -> str: ...
    def files(self) -> Sequence[TierFile]: ...

    def read_local(self, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None = None) -> bool:
        """Fill `into` from this host's disk; False if the bytes are not there."""
        ...

    def read_place(self, place: int, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event | None) -> None:
        """Fill `into` from one place. After an error that place is left out."""
        ...

    def keep(self, file: TierFile, offset: int, data: memoryview, *, is_local: bool) -> None:
        """Verify and cache bytes that were read.

        Args:
            file: The file that they are of.
            offset: Their position in the file.
            data: The bytes, which must not change until `close`.
            is_local: True if they were read from this host's disk: they are not cached again.
        """
        ...


class StripedReader:
    """Reader of the weight files of one load from the places of `tier` (`StripeReader`)."""

    def __init__(self, tier: StripedTier, places: Sequence[Place], region: Space) -> None:
        """Raises `CheckpointInvalid` if the tier does not list a weight file."""
        self._tier, self._region = tier, region
        self._files = find_files(tier, places)
        self._lock = threading.Lock()
        self.stats = ReadStats()

    def fetch(self, source: int, piece: Piece, *, is_direct: bool, cancelled: threading.Event) -> Fetched:
        began = time.perf_counter()
        if is_direct:
            self._region.populate(piece.target, pages(piece.length))
            with self._region.view(piece.target, piece.length) as into:
                from_source = self._fill(source, piece, into, cancelled)
            found = Fetched(None, from_source)
        else:
            copy = memoryview(bytearray(piece.length))
            found = Fetched(copy, self._fill(source, piece, copy, cancelled))
        with self._lock:
            self.stats.remote_seconds += time.perf_counter() - began
        return found

    def _fill(self, source: int, piece: Piece, into: memoryview, cancelled: threading.Event) -> bool:
        file = self._files[piece.file]
        if self._tier.read_local(file, piece.offset, into, cancelled):
            return False
        try:
            self._read_place(source, file, piece.offset, into, cancelled)
        except (Unavailable, CheckpointInvalid, InvalidModel) as e:
            raise SourceFailed(e) from e
        return True

    def _read_place(self, source: int, file: TierFile, offset: int, into: memoryview, cancelled: threading.Event) -> None:
        try:
            self._tier.read_place(source, file, offset, into, cancelled)
        except Cancelled:
            if cancelled.is_set():
                raise
            # Of a server without ranges: the read that opened the connection was cancelled.
            self._tier.read_place(source, file, offset, into, cancelled)

    def keep(self, piece: Piece, fetched: Fetched) -> None:
        if fetched.copy is not None:
            self._region.populate(piece.target, pages(piece.length))
            self._region.copy(piece.target, fetched.copy)
        with self._region.view(piece.target, piece.length) as data:
            self._tier.keep(self._files[piece.file], piece.offset, data, is_local=not fetched.from_source)
        with self._lock:
            self.stats.remote += piece.length


def find_files(tier: Tier | StripedTier, places: Sequence[Place]) -> list[TierFile]:
    """Return the tier's file for each place. Raises `CheckpointInvalid` if it does not list one."""
    listed = {file.name: file for file in tier.files()}
    missing = next((p.file.name for p in places if p.file.name not in listed), None)
    if missing is not None:
        raise CheckpointInvalid(f"{tier.source}/{missing} is gone; register the model again")
    return [listed[p.file.name] for p in places]
