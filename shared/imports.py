"""Imports at the start of a process, without garbage collections.

Importing a service makes a hundred thousand objects, and nearly all of them stay. Python's garbage
collector nevertheless traverses them again and again while they are made: a tenth to a quarter of
the CPU time of the imports.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import modules inside the block; for the first imports of a process.

    Disables garbage collection, and exempts what exists at the end from later collections. Forked
    children thus do not copy these objects' pages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
