"""Keep Python's garbage collector out of the way of decisions.

The state of a large cluster is millions of objects without cycles: reference counts free what is
replaced, and a full collection only traverses them, for a third of a second at 8,000 devices.
Therefore the oldest generation is collected here, when the loop is idle, and survivors are frozen
until the term ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = (5_000, 5, 1_000_000)
"""Thresholds: larger young generations, and no automatic collection of the oldest one."""
_DEFAULT = gc.get_threshold()


def freeze_heap() -> None:
    """Collect the unfrozen objects and freeze the survivors.

    Takes time in proportion to the objects created since the last call.
    """
    gc.set_threshold(*YOUNG)
    gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Restore ordinary garbage collection."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT)


@contextmanager
def growing_heap() -> Iterator[None]:
    """Disable garbage collection while a large state is built."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
