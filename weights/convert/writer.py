"""One rank's partition file, written tensor by tensor while the bytes are hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.dtypes import row_major
from shared.errors import CheckpointInvalid
from weights.convert.disk import disk_error
from weights.formats.converted import Entry, Partition, place_after
from weights.formats.segment import pages


class PartitionWriter:
    """Writer of one rank's partition. The caller closes it.

    Attributes:
        entries: The tensors that were added.
        tied: Number of those whose bytes were there already.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self.entries: list[Entry] = []
        self.tied = 0
        self._end = 0
        self._stored: dict[Hashable, Entry] = {}
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise disk_error(path, e) from e

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        size: int,
        pieces: Iterable[memoryview],
        *,
        dim: int | None = None,
        tie: Hashable | None = None,
    ) -> None:
        """Append a tensor whose `size` bytes are the consecutive `pieces`.

        The writer finishes each piece before it asks for the next. Tensors with the same `tie` (not
        None) are stored once: the first is stored.
        """
        if tie is not None and (known := self._stored.get(tie)) is not None:
            self.tied += 1
            self.entries.append(known.model_copy(update={"name": name}))
            return
        offset = place_after(self._end, size)
        digest = hashlib.sha256()
        at = offset
        for piece in pieces:
            hashed = self._hashing.submit(digest.update, piece)
            self._write(piece, at)
            hashed.result()
            at += len(piece)
        if at - offset != size:
            raise CheckpointInvalid(
                f"Tensor {name!r} has {at - offset} bytes instead of {size}; its file changed while it was read"
            )
        self._end = at
        entry = Entry(
            name=name,
            rank=self._rank,
            offset=offset,
            size=size,
            shape=shape,
            stride=row_major(shape),
            dtype=dtype,
            dim=dim,
            sha256=digest.hexdigest(),
        )
        self.entries.append(entry)
        if tie is not None:
            self._stored[tie] = entry

    def finish(self) -> Partition:
        """Flush all bytes to the disk, and drop them from the page cache.

        A later read then reads the disk.
        """
        size = pages(self._end)
        try:
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as e:
            raise disk_error(self._path, e) from e
        return Partition(rank=self._rank, file=self._path.name, size=size, tensors=len(self.entries))

    def _write(self, piece: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(piece):
                done += os.pwrite(self._fd, piece[done:], offset + done)
        except OSError as e:
            raise disk_error(self._path, e) from e

    def close(self) -> None:
        self._hashing.shutdown()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
