"""Lock between operations that add blocks to a file and those that count them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class BlockCount:
    """A shared and exclusive lock: many threads add blocks at once, one counts alone.

    A thread that waits to count goes before later threads that add.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._adding, self._waiting, self._counts = 0, 0, False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Add blocks to the file."""
        with self._changed:
            self._changed.wait_for(lambda: not self._counts and not self._waiting)
            self._adding += 1
        try:
            yield
        finally:
            with self._changed:
                self._adding -= 1
                self._changed.notify_all()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the blocks of the file while no thread adds any."""
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._counts and not self._adding)
            self._waiting -= 1
            self._counts = True
        try:
            yield
        finally:
            with self._changed:
                self._counts = False
                self._changed.notify_all()
