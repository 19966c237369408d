"""Read this host's files into the pool at the disk's full bandwidth.

Several threads read large pieces, without a copy through the page cache.

A piece of which the page cache holds half or more is taken from there as far as it goes
(`RWF_NOWAIT`); where only small pages are to be had, through a buffer that stays in the CPU's
cache: written from there, the segment's new pages are not zeroed first. The rest is read by
O_DIRECT straight into the chunk, whose pages other threads have populated (`populating.py`). Files
start on pages of the segment, so file offset, memory address and length are aligned alike; only a
file's last, partial page goes through a buffered read. File systems that refuse O_DIRECT are read
buffered, and that is logged once.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.segment import PAGE
from shared.errors import CheckpointInvalid
from weights.formats.checkpoint import WeightFile
from weights.formats.segment import Place
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.region import Space
from weights.transfer.page_cache import cached_bytes
from weights.transfer.pieces import Piece
from weights.transfer.populating import Populating

log = logging.getLogger(__name__)
_COPY_BYTES = 1024 * 1024
_buffered_logged = threading.Event()


@dataclass(frozen=True)
class ReadOptions:
    """Options of reads. Only bench/loader.py changes the defaults.

    `chunk_bytes`, the size of one read, is a multiple of the page size.
    """

    threads: int = 4
    chunk_bytes: int = CHUNK_BYTES
    direct: bool = True
    populate: bool = True

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"{self.threads} threads read nothing: give at least one")
        if self.chunk_bytes < PAGE or self.chunk_bytes % PAGE:
            raise ValueError(
                f"chunk_bytes is {self.chunk_bytes}: it must be a multiple of {PAGE}, as direct reads begin on pages only"
            )


DEFAULTS = ReadOptions()


@dataclass
class ReadStats:
    """Bytes by the way they were read, and seconds of each step, over all threads."""

    direct: int = 0
    cached: int = 0
    buffered: int = 0
    remote: int = 0
    allocate_seconds: float = 0.0
    disk_seconds: float = 0.0
    copy_seconds: float = 0.0
    remote_seconds: float = 0.0

    def add(self, other: ReadStats) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class _File:
    """An open weight file, checked against the file that its header was read from.

    The check happens at the first piece and after the last.
    """

    def __init__(self, file: WeightFile, pieces: int, wants_direct: bool) -> None:
        self.path, self.size, self._stamp = file.path, file.size, file.stamp
        self._lock = threading.Lock()
        self._left, self._wants_direct = pieces, wants_direct
        self._fd = self._direct = -1

    def open(self) -> tuple[int, int]:
        """(buffered, direct) descriptors; direct is -1 where the file system has none."""
        with self._lock:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                self._check("changed after its header was read")
                if self._wants_direct:
                    self._open_direct()
            return self._fd, self._direct

    def _open_direct(self) -> None:
        try:
            self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self.no_direct()

    def no_direct(self) -> None:
        if not _buffered_logged.is_set():
            _buffered_logged.set()
            log.warning("this file system refuses O_DIRECT; reading through the page cache", extra={"file": str(self.path)})

    def piece_done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._check("changed while it was read")
                self._close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _check(self, what: str) -> None:
        stat = os.fstat(self._fd)
        if (stat.st_size, stat.st_mtime_ns, stat.st_ino) != (self.size, *self._stamp):
            raise CheckpointInvalid(
                f"{self.path} {what}; wait until it is written, then register the model again", should_retry=True
            )


class FilesReader:
    """Reads the weight files of one load. `read` is called from several threads."""

    def __init__(self, places: Sequence[Place], pieces: Sequence[Piece], region: Space, options: ReadOptions = DEFAULTS) -> None:
        """Prepare the reads.

        Args:
            places: The weight files in the segment.
            pieces: What is read of them, in the order of the reads.
        """
        counts = [0] * len(places)
        for piece in pieces:
            counts[piece.file] += 1
        self._files = [_File(p.file, n, options.direct) for p, n in zip(places, counts, strict=True)]
        self._region, self._options = region, options
        self._populating = Populating(pieces, region) if options.populate else None
        self._lock, self._buffers = threading.Lock(), threading.local()
        self.stats = ReadStats()

    def read(self, piece: Piece) -> None:
        """Read a piece.

        Raises:
            CheckpointInvalid: A file changes, shrinks or cannot be read.
            InsufficientMemory: Shared memory is full.
        """
        file = self._files[piece.file]
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(bytearray(_COPY_BYTES))
        try:
            got = _read_piece(file, piece, self._region, self._buffers.view, self._populating)
            file.piece_done()
        except OSError as e:
            raise CheckpointInvalid(f"{file.path} cannot be read: {e.strerror}; check its permissions and the disk") from e
        with self._lock:
            self.stats.add(got)

    def close(self) -> None:
        if self._populating is not None:
            self._populating.close()
            self.stats.allocate_seconds = self._populating.seconds
        for file in self._files:
            file.close()


def _read_piece(file: _File, piece: Piece, region: Space, buffer: memoryview, populating: Populating | None) -> ReadStats:
    fd, direct = file.open()
    cached = direct < 0 or _worth_copying(fd, piece)
    has_memory = populating is not None and not (cached and populating.uses_small_pages)
    if populating is not None and has_memory:
        populating.wait(piece)
    began = time.perf_counter()
    resident = _copy_resident(fd, piece, region, None if has_memory else buffer) if cached else 0
    copied = time.perf_counter()
    # Back to the page: a direct read may start nowhere else.
    done = resident if resident == piece.length else resident // PAGE * PAGE
    got = ReadStats(cached=done, copy_seconds=copied - began)
    if done == piece.length:
        if populating is not None:
            populating.skip(piece)
        return got
    if populating is not None:
        populating.wait(piece)
    waited = time.perf_counter()
    with region.view(piece.target, piece.length) as into:
        if direct >= 0:
            got.direct = _direct(file, direct, into, piece.offset, done)
            done += got.direct
        got.buffered = _read_buffered(file, fd, into, piece.offset, done)
    got.disk_seconds = time.perf_counter() - waited
    return got


def _pread(fd: int, into: memoryview, start: int, end: int, offset: int, flags: int = 0) -> int:
    with into[
        start:end
    ] as part:  # released even while an error's traceback still refers to it, or the segment could not be unmapped
        return os.preadv(fd, [part], offset + start, flags)


def _worth_copying(fd: int, piece: Piece) -> bool:
    """True if the page cache has enough of the piece to copy it from there.

    The answer is as good as the kernel's report.
    """
    cached = cached_bytes(fd, piece.offset, piece.length)
    return cached is None or 2 * cached >= piece.length


def _copy_resident(fd: int, piece: Piece, region: Space, buffer: memoryview | None) -> int:
    """Copy cached bytes from the piece's start on, without waiting for the disk.

    Bytes go straight into memory that is populated already, and into new memory by way of `buffer`.

    Args:
        buffer: None: the piece was populated.

    Returns:
        Bytes copied.
    """
    if buffer is None or region.is_ready(piece.target, piece.length):
        with region.view(piece.target, piece.length) as into:
            return _resident_into(fd, piece, into)
    done = 0
    try:
        while done < piece.length:
            got = _pread(fd, buffer, 0, min(len(buffer), piece.length - done), piece.offset + done, os.RWF_NOWAIT)
            if got == 0:
                break
            with buffer[:got] as part:
                region.copy(piece.target + done, part)
            done += got
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
            raise
    return done


def _resident_into(fd: int, piece: Piece, into: memoryview) -> int:
    done = 0
    try:
        while done < piece.length and (got := _pread(fd, into, done, piece.length, piece.offset, os.RWF_NOWAIT)):
            done += got
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
            raise
    return done


def _direct(file: _File, fd: int, into: memoryview, offset: int, start: int) -> int:
    """Read whole pages past the page cache from `offset + start`.

    Returns:
        Bytes read; fewer where the file system turns out to refuse direct reads.
    """
    done, end = start, len(into) // PAGE * PAGE
    while done < end:
        try:
            got = _pread(fd, into, done, end, offset)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            file.no_direct()
            break
        if got == 0:
            raise _make_shrank_error(file)
        done += got
        if done % PAGE:  # a short, unaligned read: the rest goes buffered
            break
    return done - start


def _read_buffered(file: _File, fd: int, into: memoryview, offset: int, start: int) -> int:
    done = start
    while done < len(into):
        got = _pread(fd, into, done, len(into), offset)
        if got == 0:
            raise _make_shrank_error(file)
        done += got
    return done - start


def _make_shrank_error(file: _File) -> CheckpointInvalid:
    return CheckpointInvalid(
        f"{file.path} shrank while it was read; wait until it is written, then register the model again", should_retry=True
    )
