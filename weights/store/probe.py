"""Measure the size/throughput curve of copies into a separate device's pages."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from ctypes import addressof, c_char

from shared.contracts.segment import SegmentTensor
from weights.devices.curve import FALLBACK_BYTES, KIB, Point, cap_curve, find_elbow
from weights.devices.probe import measure_rounds
from weights.store.memory import PageMemory
from weights.store.missing import Missing, digests_of
from weights.store.pages import StoredUnit
from weights.store.units import PAGE_BYTES, Unit

log = logging.getLogger(__name__)
SIZES = tuple(256 * KIB * 2**i for i in range(5))
"""256 KiB to 4 MiB. A unit has at least a page of 2 MiB, unless it is a model's last one."""
_ROUNDS, _SECONDS = 9, 0.15


def measure(memory: PageMemory, sizes: Sequence[int] = SIZES) -> list[Point]:
    """Measure copies of each size, hashing included.

    One thread does the copies, and the probe measures its CPU time, so that other processes do not
    change the curve. It takes at most 0.15 s, or one round of 20 MiB where that takes longer.

    Args:
        memory: Pages for the largest size; their content is lost.
    """
    largest = max(sizes)
    pages = tuple(range(-(-largest // PAGE_BYTES)))
    with mmap.mmap(-1, largest) as host:
        anchor = c_char.from_buffer(host)
        address = addressof(anchor)

        def copy(size: int, count: int) -> None:
            tensor = SegmentTensor(name="", dtype="U8", shape=(size,), offset=0, nbytes=size)
            unit = StoredUnit("probe", size, pages, frozenset())
            for _ in range(count):
                digests_of(Missing(Unit("probe", 0, size), "probe", (tensor,), pieces=[(0, address, size)]))
                memory.write(unit, 0, address, size)

        try:
            copy(largest, 1)  # the pages get their memory
            return measure_rounds(copy, sizes, bytes_per_point=largest, rounds=_ROUNDS, seconds=_SECONDS, clock=time.thread_time)
        finally:
            del anchor


def group_bytes(device_id: str, bytes_per_second: float | None = None) -> int:
    """Measure a separate device's curve, and return its elbow.

    If the measurement fails, log it and return the published elbow.

    Args:
        device_id: The device, for the log.
        bytes_per_second: Pace of the link from host memory; None: not paced.
    """
    memory = PageMemory(None, -(-max(SIZES) // PAGE_BYTES))
    try:
        points = measure(memory)
    except OSError as e:
        log.warning("failed to measure a device's copies", extra={"device": device_id, "error": str(e)})
        return FALLBACK_BYTES
    finally:
        memory.close()
    chosen = find_elbow(cap_curve(points, bytes_per_second))
    log.info("copies are grouped", extra={"device": device_id, "group_bytes": chosen})
    return chosen
