"""Python's cycle collector, kept out of the way of decisions.

The state of a large cluster is millions of objects without cycles: reference counts free what is replaced, and a full collection only
walks it all, for a third of a second at 8,000 devices. So collections of the oldest generation are made here, at times of the loop's
choosing, and what has survived one is not looked at again until the term ends.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = (5_000, 5, 1_000_000)
"""Thresholds: the two young generations as usual but larger, the oldest never by itself."""
_DEFAULT = gc.get_threshold()


def freeze_heap() -> None:
    """Collect what is not settled yet, and count what survives as settled. Takes as long as there are objects made since the last time."""
    gc.set_threshold(*YOUNG)
    gc.collect()
    gc.freeze()


def unfreeze_heap() -> None:
    """Everything is collected as usual again."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT)


@contextmanager
def growing_heap() -> Iterator[None]:
    """Nothing is collected while a large state is made, of which nothing can be garbage yet."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
