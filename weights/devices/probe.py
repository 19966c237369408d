"""Measure a device's size/throughput curve once, and store it."""

from __future__ import annotations

import json
import logging
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_char
from pathlib import Path

from shared.errors import ThawError
from weights.devices.curve import PROBE_SIZES, Point, find_elbow
from weights.devices.driver import CudaDriver, DeviceFacts

log = logging.getLogger(__name__)
_BYTES_PER_POINT = 128 * 1024 * 1024
_ROUNDS = 3
_SECONDS = 2.0


def measure_rounds(
    copy: Callable[[int, int], None],
    sizes: Sequence[int],
    *,
    bytes_per_point: int,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Point]:
    """Time copies of each size, and return the best round of each.

    The sizes take turns, so that other work on the machine does not slow one of them only.

    Args:
        copy: Makes copies of the first argument's size, as many as the second says.
        sizes: Bytes of a copy.
        bytes_per_point: Bytes to copy for each size in a round; at least one copy.
        rounds: Most rounds over all sizes.
        seconds: No round begins after this time. The first round is always complete.
    """
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    began = clock()
    for number in range(rounds):
        if number and clock() - began >= seconds:
            break
        for size in sizes:
            count = max(1, bytes_per_point // size)
            started = clock()
            copy(size, count)
            rates[size].append(size * count / max(clock() - started, 1e-9))
    return [Point(size, max(found)) for size, found in rates.items()]


def measure(
    driver: CudaDriver,
    facts: DeviceFacts,
    sizes: Sequence[int] = PROBE_SIZES,
    bytes_per_point: int = _BYTES_PER_POINT,
    clock: Callable[[], float] = time.monotonic,
) -> list[Point]:
    """Measure copies of each size from page-locked memory.

    The best of up to three rounds counts; no round begins after two seconds.
    Copies follow each other as the device's thread issues them. The measurement takes twice the
    largest size for a moment, half of it on the device.

    Raises:
        DeviceFailed: A copy failed.
        InsufficientMemory: The memory does not suffice.
    """
    largest = max(sizes)
    driver.use(facts.index)
    with mmap.mmap(-1, largest) as host:
        anchor = c_char.from_buffer(host)
        address = addressof(anchor)
        try:
            driver.register(address, largest)
            try:
                target = driver.allocate(largest)
                try:
                    stream = driver.stream(urgent=True)
                    try:

                        def copy(size: int, count: int) -> None:
                            for _ in range(count):
                                driver.copy(target, address, size, stream)
                            driver.wait(driver.record(stream))

                        return measure_rounds(
                            copy,
                            sizes,
                            bytes_per_point=max(bytes_per_point, 2 * largest),
                            rounds=_ROUNDS,
                            seconds=_SECONDS,
                            clock=clock,
                        )
                    finally:
                        driver.destroy_stream(stream)
                finally:
                    driver.free(target)
            finally:
                driver.unregister(address)
        finally:
            del anchor  # the mapping cannot be closed while it is exported


def group_bytes(driver: CudaDriver, facts: DeviceFacts, cache: Path) -> int:
    """Return the device's elbow, measured now or read from `cache`.

    A measurement that fails is logged, and the elbow is the published one.

    Args:
        cache: JSON file of measurements with this driver; created if missing.
    """
    key = f"{facts.bus_id} driver {facts.driver_version}"
    curves = _read(cache)
    if key not in curves:
        try:
            curves[key] = measure(driver, facts)
        except ThawError as e:
            log.warning("failed to measure a device's bus", extra={"device": facts.bus_id, "error": e.message})
            return find_elbow(())
        _write(cache, curves)
    chosen = find_elbow(curves[key])
    log.info("copies are grouped", extra={"device": facts.bus_id, "group_bytes": chosen})
    return chosen


def _write(cache: Path, curves: Mapping[str, Sequence[Point]]) -> None:
    text = {k: [[p.nbytes, p.bytes_per_second] for p in points] for k, points in curves.items()}
    temporary = cache.with_suffix(".new")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(text))
        temporary.replace(cache)
    except OSError as e:
        log.warning("failed to store a device's size/throughput curve", extra={"path": str(cache), "error": str(e)})


def _read(cache: Path) -> dict[str, list[Point]]:
    try:
        return {key: [Point(int(n), float(b)) for n, b in points] for key, points in json.loads(cache.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        log.warning(
            "failed to read the stored size/throughput curves; measuring again", extra={"path": str(cache), "error": str(e)}
        )
        return {}
