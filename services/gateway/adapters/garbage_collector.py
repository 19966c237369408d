"""Python's cycle collector, kept out of the way of requests.

A full collection walks every object of the process: with 10,000 open connections it stalls all requests for 0.1 s, and by default
connections that arrive make it happen. Reference counts free nearly everything that the gateway drops, and collections of the young
generations the rest. So full collections run while no request is in flight, or once memory has grown.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path

_THRESHOLDS = (5_000, 10, 1_000_000)
"""Young generations a little larger than Python's; the oldest never by itself."""
_PERIOD_S = 60.0
_GROWTH_BYTES = 256 << 20
"""Memory growth after which a full collection is worth a stall."""


def start_collecting_rarely() -> None:
    """Exempt what exists now from collections, and leave full collections to `collect_when_idle`. For the end of a start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def collect_when_idle(
    activity: Callable[[], int | None], *, period_s: float = _PERIOD_S, memory_bytes: Callable[[], int] | None = None
) -> None:
    """Collect fully, until cancelled, when no request is in flight or memory has grown by 256 MiB.

    Args:
        activity: A number that changes whenever requests were served, or None while the gateway is busy.
        period_s: Time between checks.
        memory_bytes: Resident memory of this process.
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
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
