"""Store a partial model: pieces on the disk.

The process that fetches the model and the processes that follow it can read them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from shared.contracts.segment import PAGE
from weights.cache.journal import Journal, JournalHead, Piece, head_of
from weights.cache.ranges import RangeSet
from weights.tiers.port import TierFile


class PartialModel:
    """The directory `partial/REVISION` of the cache: the pieces of a model that is being fetched.

    One process writes (the holder of the fill lock), others read. Its methods raise `OSError`.
    """

    def __init__(self, directory: Path, revision: str, source: str, files: Sequence[TierFile], *, writes: bool) -> None:
        self._directory = directory
        self._head = head_of(revision, source, files)
        self._index = {f.name: i for i, f in enumerate(files)}
        self._sizes = [f.size for f in files]
        self._fds: dict[tuple[str, bool], int] = {}
        self._lock = threading.Lock()
        self._writes, self._is_closed = writes, False
        self._known: JournalHead | None = None
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(directory)
        try:
            if writes:
                self.take_over()
            else:
                self._journal.refresh()
        except BaseException:
            self.close()
            raise

    def take_over(self) -> None:
        """Continue where another process ended, or begin."""
        with self._lock:
            self._writes = True
            self._close_files()
            self._journal.refresh()
            if not self._is_same(self._journal.head):
                self._journal.begin(self._head)

    def _is_same(self, head: JournalHead | None) -> bool:
        """True if the journal is of the same model.

        Peers and sources may report different versions of it.
        """
        if head is None or head.revision != self._head.revision:
            return False
        return [(f.name, f.size) for f in head.files] == [(f.name, f.size) for f in self._head.files]

    def refresh(self) -> bool:
        """Read what the writing process has added; True if there was anything."""
        with self._lock:
            return self._journal.refresh()

    @property
    def writes(self) -> bool:
        """True if this process writes the model."""
        return self._writes

    @property
    def stale(self) -> bool:
        return self._journal.stale

    def has(self, file: TierFile, offset: int, length: int) -> bool:
        with self._lock:
            if self._journal.head is not self._known:
                if not self._is_same(self._journal.head):
                    return False
                self._known = self._journal.head
            there = self._journal.there.get(self._index[file.name])
            return there is not None and there.covers(offset, offset + length)

    def list_missing(self, file: TierFile) -> list[tuple[int, int]]:
        with self._lock:
            there = self._journal.there.get(self._index[file.name])
            return [(0, file.size)] if there is None and file.size else [] if there is None else there.list_missing(file.size)

    def read(self, file: TierFile, offset: int, into: memoryview) -> bool:
        """Fill `into` from the disk; False if the disk does not have the bytes."""
        if not len(into):
            return True
        if not self.has(file, offset, len(into)):
            return False
        end = offset + len(into)
        with self._lock:
            known = self._journal.pieces.get(self._index[file.name], {}).values()
            pieces = [p for p in known if p.offset < end and p.offset + p.length > offset]
        if not _cover(pieces, offset, end):  # another thread has found one damaged meanwhile
            return False
        if len(pieces) == 1 and (pieces[0].offset, pieces[0].length) == (offset, len(into)):
            return self._read_whole(file.name, pieces[0], into)
        for piece in pieces:
            data = memoryview(bytearray(piece.length))
            if not self._read_whole(file.name, piece, data):
                return False
            low, high = max(offset, piece.offset), min(end, piece.offset + piece.length)
            into[low - offset : high - offset] = data[low - piece.offset : high - piece.offset]
        return True

    def _read_whole(self, name: str, piece: Piece, into: memoryview) -> bool:
        try:
            fd, done = self._fd(name, direct=False), 0
            while done < len(into):
                with into[done:] as rest:
                    got = os.preadv(fd, [rest], piece.offset + done)
                if got == 0:
                    break
                done += got
        except OSError:
            done = -1
        if done == len(into) and zlib.crc32(into) == piece.crc:
            return True
        with self._lock:
            self._journal.remove(piece)
        return False

    def write(self, file: TierFile, offset: int, data: memoryview) -> None:
        """Write bytes, past the page cache where address, offset and length allow it."""
        done = self._write_direct(file.name, offset, data)
        fd = self._fd(file.name, direct=False)
        while done < len(data):
            with data[done:] as rest:
                done += os.pwrite(fd, rest, offset + done)
        piece = Piece(file=self._index[file.name], offset=offset, length=len(data), crc=zlib.crc32(data))
        with self._lock:
            self._journal.add(piece)

    def _write_direct(self, name: str, offset: int, data: memoryview) -> int:
        whole = len(data) // PAGE * PAGE
        if offset % PAGE or not whole:
            return 0
        done = 0
        try:
            fd = self._fd(name, direct=True)
            while done < whole:
                with data[done:whole] as rest:
                    done += os.pwrite(fd, rest, offset + done)
                if done % PAGE:
                    break
        except OSError as e:
            if e.errno != errno.EINVAL:  # memory that does not start on a page, or a file system without direct writes
                raise
        return done

    def make_whole(self) -> None:
        """Give every file its size: an empty one has no piece."""
        for name, index in self._index.items():
            os.ftruncate(self._fd(name, direct=False), self._sizes[index])

    def drop(self, file: TierFile) -> None:
        """Remove all pieces of one file, which is damaged."""
        with self._lock:
            self._journal.drop(self._index[file.name])
            for direct in (True, False):
                fd = self._fds.pop((file.name, direct), -1)
                if fd >= 0:
                    os.close(fd)
            (self._directory / file.name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything: the disk is full or unusable.

        Other threads may still write. Their files are not made again. Readers find no
        bytes any more.
        """
        with self._lock:
            self._writes = False
            with contextlib.suppress(OSError):
                if self._journal.stale:  # the files are another's by now, such as an entry's
                    return
            for fd in self._fds.values():
                with contextlib.suppress(OSError):  # an open file keeps its blocks, and the load may take long
                    os.ftruncate(fd, 0)
            with contextlib.suppress(OSError):
                shutil.rmtree(self._directory)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._close_files()
            self._journal.close()

    def _close_files(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, name: str, *, direct: bool) -> int:
        """Open a file until `close`.

        A model that became an entry, or was removed, is still readable.
        """
        with self._lock:
            if self._is_closed:  # what is opened now would never be closed
                raise OSError(errno.EBADF, "the partial model is closed")
            key = (name, direct)
            if key not in self._fds:
                path = self._directory / name
                flags = os.O_RDONLY
                if self._writes:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    flags = os.O_RDWR | os.O_CREAT
                self._fds[key] = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o644)
            return self._fds[key]


def _cover(pieces: Iterable[Piece], start: int, end: int) -> bool:
    """True if `pieces` have every byte from `start` up to `end`."""
    ranges = RangeSet()
    for piece in pieces:
        ranges.add(piece.offset, piece.offset + piece.length)
    return ranges.covers(start, end)
