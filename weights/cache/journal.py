"""Journal a partial model: append a line per piece when the piece is in its file.

The first line names the model and its files. Pieces are not flushed one by one: after a crash of
the machine a piece's CRC-32 shows whether the disk has it. Other processes follow by reading new
lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.contracts.base import Frozen
from weights.cache.ranges import RangeSet
from weights.tiers.port import TierFile

NAME = "journal"
VERSION = 1


class FileHead(Frozen):
    name: str
    size: int
    version: str
    sha256: str | None = None
    md5: str | None = None


class JournalHead(Frozen):
    version: int = VERSION
    revision: str
    source: str
    files: tuple[FileHead, ...]


class Piece(Frozen):
    """Bytes from `offset` on of the `file`th file."""

    file: int
    offset: int
    length: int
    crc: int


def head_of(revision: str, source: str, files: Sequence[TierFile]) -> JournalHead:
    heads = tuple(FileHead(name=f.name, size=f.size, version=f.version, sha256=f.sha256, md5=f.md5) for f in files)
    return JournalHead(revision=revision, source=source, files=heads)


class Journal:
    """The journal in `directory`. Not safe for several threads at once."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._read_to = 0
        self._rest = b""
        self.head: JournalHead | None = None
        self.pieces: dict[int, dict[int, Piece]] = {}
        self.there: dict[int, RangeSet] = {}

    def refresh(self) -> bool:
        """Read lines appended since the last call; True if there were any.

        Skips lines that a crash truncated.
        """
        if os.fstat(self._fd).st_size < self._read_to:  # restarted
            self._reset()
        data = self._rest
        while block := os.pread(self._fd, 1 << 20, self._read_to):
            self._read_to += len(block)
            data += block
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            self._take(line)
        return bool(lines)

    def _take(self, line: bytes) -> None:
        try:
            value: Any = json.loads(line)
            if isinstance(value, dict):
                head = JournalHead.model_validate(value)
                self.head = head if self.head is None and head.version == VERSION else self.head
            else:
                file, offset, length, crc = value
                self._put(Piece(file=file, offset=offset, length=length, crc=crc))
        except (ValueError, TypeError, ValidationError):
            return

    def _put(self, piece: Piece) -> None:
        pieces = self.pieces.setdefault(piece.file, {})
        before, pieces[piece.offset] = pieces.get(piece.offset), piece
        if before is not None and before.length > piece.length:  # it was damaged, and is being fetched again
            self._count_again(piece.file)
            return
        self.there.setdefault(piece.file, RangeSet()).add(piece.offset, piece.offset + piece.length)

    def begin(self, head: JournalHead) -> None:
        """Empty it and write `head`."""
        os.ftruncate(self._fd, 0)
        self._reset()
        self._append(head.model_dump_json().encode())
        self.refresh()

    def _reset(self) -> None:
        self._read_to, self._rest, self.head = 0, b"", None
        self.pieces, self.there = {}, {}

    def add(self, piece: Piece) -> None:
        # The newline is written first, so that a line that a crash truncated does not merge with
        # this one.
        self._append(json.dumps([piece.file, piece.offset, piece.length, piece.crc]).encode())
        self._put(piece)

    def _append(self, line: bytes) -> None:
        os.write(self._fd, b"\n" + line + b"\n")

    def remove(self, piece: Piece) -> None:
        """Remove `piece`, which the disk does not have."""
        self.pieces.get(piece.file, {}).pop(piece.offset, None)
        self._count_again(piece.file)

    def _count_again(self, file: int) -> None:
        there = self.there[file] = RangeSet()
        for piece in self.pieces.get(file, {}).values():
            there.add(piece.offset, piece.offset + piece.length)

    def drop(self, file: int) -> None:
        """Remove all pieces of one file; followers restart from the beginning.

        Raises `OSError`.
        """
        assert self.head is not None
        kept = [p for pieces in self.pieces.values() for p in pieces.values() if p.file != file]
        head = self.head
        draft = self.path.with_suffix(".new")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.close(self._fd)
        self._fd = fd
        draft.replace(self.path)
        self.begin(head)
        for piece in kept:
            self.add(piece)

    @property
    def stale(self) -> bool:
        """True if the journal's path has another file now: removed, or restarted."""
        try:
            return self.path.stat().st_ino != os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return True

    def close(self) -> None:
        os.close(self._fd)
