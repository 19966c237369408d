"""Split the parts of a file into lines, in linear time and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RawLine:
    """A line without its end.

    Attributes:
        data: Its bytes; empty if they exceed the limit.
        nbytes: Their number.
        is_over: They exceed the limit.
    """

    data: bytes
    nbytes: int
    is_over: bool = False


class LineSplitter:
    """Takes the parts of a file one after another."""

    def __init__(self, limit_bytes: int) -> None:
        """Begin a file.

        Args:
            limit_bytes: A longer line is counted, and not kept.
        """
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def split(self, part: bytes) -> Iterator[RawLine]:
        """Yield the lines that end in this part. Take them all before the next part."""
        *ends, rest = part.split(b"\n")
        for piece in ends:
            self._add(piece)
            yield self.end_line()
        self._add(rest)

    def end_line(self) -> RawLine:
        """Return the line that has begun: at the end of the file it needs no line break."""
        line = RawLine(b"".join(self._pieces), self._nbytes, self._nbytes > self._limit_bytes)
        self._pieces, self._nbytes = [], 0
        return line

    def _add(self, piece: bytes) -> None:
        self._nbytes += len(piece)
        if self._nbytes > self._limit_bytes:
            self._pieces = []
        else:
            self._pieces.append(piece)
