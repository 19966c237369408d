"""Read a file of a server without ranges over one connection, from start to end.

Readers take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weights.tiers.http_client import Answer
from weights.tiers.port import Cancelled

_GAP_S = 1.0
"""Bytes in between are kept this long for another reader before they are skipped."""
_SLICE_S = 0.1
_SCRATCH_BYTES = 1024 * 1024


class WholeFileStream:
    """Readers wait until the connection reaches their offset.

    A late reader, or one after an error, opens a new connection.
    """

    def __init__(self, connect: Callable[[threading.Event | None], Answer]) -> None:
        self._connect = connect
        self._turn = threading.Condition()
        self._waiting: list[int] = []
        self._busy = False
        self._answer: Answer | None = None
        self._position = 0

    def read(self, offset: int, into: memoryview, cancelled: threading.Event | None) -> int:
        """Fill `into` with the bytes from `offset` on; its length.

        Raises `OSError`, `HTTPException` or `Cancelled`.
        """
        self._await_turn(offset, cancelled)
        try:
            if self._answer is None or offset < self._position:
                self._drop()
                self._answer, self._position = self._connect(cancelled), 0
            self._skip(self._answer, offset)
            done = 0
            while done < len(into):
                with into[done:] as rest:
                    got = self._answer.readinto(rest)
                if got == 0:
                    raise ConnectionError("the connection was cut")
                done += got
                self._position += got
            return done
        except BaseException:
            self._drop()
            raise
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _await_turn(self, offset: int, cancelled: threading.Event | None) -> None:
        patient_until = time.monotonic() + _GAP_S
        with self._turn:
            self._waiting.append(offset)
            try:
                while not self._is_turn(offset, time.monotonic() > patient_until):
                    self._turn.wait(_SLICE_S)
                    if cancelled is not None and cancelled.is_set():
                        raise Cancelled
                    if self._busy:
                        patient_until = time.monotonic() + _GAP_S
                self._busy = True
            finally:
                self._waiting.remove(offset)

    def _is_turn(self, offset: int, impatient: bool) -> bool:
        if self._busy:
            return False
        if offset == self._position:
            return True
        return impatient and offset == min(self._waiting)

    def _skip(self, answer: Answer, offset: int) -> None:
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, max(0, offset - self._position))))
        while self._position < offset:
            got = answer.readinto(scratch[: offset - self._position])
            if got == 0:
                raise ConnectionError("the connection was cut")
            self._position += got

    def _drop(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
        self._position = 0

    def close(self) -> None:
        with self._turn:
            self._drop()
