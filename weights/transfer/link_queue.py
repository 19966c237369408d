"""Choose the load whose chunk a link reads next, and measure bandwidth (ADR 0013).

The module has values only. Loads that a request waits for precede background ones. Within a class
they take turns, a chunk each (fair), or follow each other in order of arrival (in order). A
cancellation or a change of priority takes effect at the load's next chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

Order = Literal["fair", "in-order"]
WINDOW_S = 0.1
"""Speed is learned from windows of this length in which the link was busy: single chunks of several
threads say little.
"""
_LEAST_S = 0.02
_WINDOWS = 9


@dataclass(frozen=True)
class Load:
    """One load's queue entry.

    Attributes:
        load: Number of the load.
        chunks: Number of chunks that are not started yet.
        nbytes: Bytes of these chunks.
        under_way: Bytes that are being read.
    """

    load: int
    chunks: int
    nbytes: int
    background: bool = False
    under_way: int = 0


@dataclass(frozen=True)
class Line:
    """The loads of one link; the first of a class is next."""

    order: Order = "fair"
    loads: tuple[Load, ...] = ()

    @property
    def queued_bytes(self) -> int:
        return sum(x.nbytes + x.under_way for x in self.loads)


def join(line: Line, load: Load) -> Line:
    return replace(line, loads=(*line.loads, load))


def leave(line: Line, load: int) -> Line:
    return replace(line, loads=tuple(x for x in line.loads if x.load != load))


def raise_priority(line: Line, load: int) -> Line:
    """Give the load the priority of a request, because a request waits for it now."""
    return replace(line, loads=tuple(replace(x, background=False) if x.load == load else x for x in line.loads))


def offer(line: Line, load: int, chunks: int, nbytes: int) -> Line:
    """Change what a load has still to start on this link: it is read over several."""
    return replace(line, loads=tuple(replace(x, chunks=chunks, nbytes=nbytes) if x.load == load else x for x in line.loads))


def find_next(line: Line) -> int | None:
    """The load whose chunk is read next; None if nothing is left to begin."""
    ready = [x for x in line.loads if x.chunks]
    return next((x.load for x in sorted(ready, key=lambda x: x.background)), None)


def record_begin(line: Line, load: int, nbytes: int) -> Line:
    """Record that a chunk of `load` is being read.

    With turns, the load is now behind the others of its class.
    """
    [found] = [x for x in line.loads if x.load == load]
    moved = replace(found, chunks=found.chunks - 1, nbytes=max(0, found.nbytes - nbytes), under_way=found.under_way + nbytes)
    if line.order == "in-order":
        return replace(line, loads=tuple(moved if x is found else x for x in line.loads))
    return replace(line, loads=(*(x for x in line.loads if x is not found), moved))


def record_end(line: Line, load: int, nbytes: int) -> Line:
    """Record that a chunk has been read."""
    return replace(line, loads=tuple(replace(x, under_way=x.under_way - nbytes) if x.load == load else x for x in line.loads))


@dataclass(frozen=True)
class Speed:
    """Bandwidth of a link.

    Attributes:
        since: Monotonic seconds when the present window began; None: the link is idle.
        windows: Bytes per second of the latest windows.
    """

    since: float | None = None
    nbytes: int = 0
    windows: tuple[float, ...] = ()

    @property
    def bytes_per_second(self) -> float | None:
        """The median window: a stall or a burst does not move it."""
        return median(self.windows) if self.windows else None


def record_busy(speed: Speed, now: float) -> Speed:
    """Record that the link has begun a chunk."""
    return replace(speed, since=now, nbytes=0) if speed.since is None else speed


def record_bytes(speed: Speed, nbytes: int, now: float) -> Speed:
    """Record `nbytes` read."""
    if speed.since is None:
        return speed
    speed = replace(speed, nbytes=speed.nbytes + nbytes)
    return _close_window(speed, now, now) if now - (speed.since or now) >= WINDOW_S else speed


def record_idle(speed: Speed, now: float) -> Speed:
    """Record that the link is idle."""
    if speed.since is None:
        return speed
    if now - speed.since < _LEAST_S and speed.windows:
        return replace(speed, since=None, nbytes=0)
    return _close_window(speed, now, None)


def _close_window(speed: Speed, now: float, since: float | None) -> Speed:
    assert speed.since is not None
    rate = speed.nbytes / max(now - speed.since, 1e-6)
    windows = (*speed.windows, rate)[-_WINDOWS:] if speed.nbytes else speed.windows
    return Speed(since, 0, windows)
