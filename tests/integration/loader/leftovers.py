"""Threads and descriptors that a test has left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.descriptors import open_files
from tests.support.launcher import until

_WITHIN_S = 60.0


@contextmanager
def without_leftovers(*threads: str) -> Iterator[None]:
    """Wait after the block until all of its descriptors are closed, and its threads have ended.

    A thread ends a moment after what it has done is reported.

    Args:
        threads: How the names of the threads begin.
    """
    before = open_files()
    yield

    def list_left() -> list[object]:
        return [*(open_files() - before), *(t.name for t in threading.enumerate() if t.name.startswith(threads))]

    until(lambda: not list_left(), _WITHIN_S, lambda: f"without {list_left()}")
