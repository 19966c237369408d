"""Scheduling of Python's cycle collector, so that it does not delay requests.

A full collection visits every object of the process: with 10,000 open connections it stalls all
requests for 0.1 s, and by default arriving connections trigger it. Reference counts free nearly
everything that the gateway drops, and collections of the young generations free the rest. So full
collections run while no request is in flight, or once memory has grown.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

_THRESHOLDS = (5_000, 10, 1_000_000)
"""Young generations are a little larger than by default; the oldest is never triggered."""
_PERIOD_S = 60.0
_GROWTH_BYTES = 256 << 20
"""Memory growth that justifies the stall of a full collection."""


def start_collecting_rarely() -> None:
    """Exempt the present objects, and leave full collections to `collect_when_idle`.

    Call it once the process has started.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def collect_when_idle(
    activity: Callable[[], int | None], *, period_s: float = _PERIOD_S, memory_bytes: Callable[[], int] | None = None
) -> None:
    """Run full collections while the gateway is idle or has grown, until cancelled.

    Args:
        activity: Returns a number that changes with each request, or None while the gateway is
            busy.
        period_s: Time between checks.
        memory_bytes: Returns the resident memory of this process.
    """
    memory_bytes = memory_bytes or resident_bytes
    seen, floor = activity(), memory_bytes()
    while True:
        await asyncio.sleep(period_s)
        current = activity()
        if (current is None or current == seen) and memory_bytes() < floor + _GROWTH_BYTES:
            continue
        gc.collect()
        seen, floor = current, memory_bytes()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
