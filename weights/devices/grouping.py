"""Choose the bytes that a device's bus copies next, as pure state.

Small copies waste the bus: each has a fixed cost. Large copies cannot be interrupted, and delay
later ones. So ranges that are adjacent on both sides are joined up to `group_bytes` (the elbow of
the device's measured curve, `curve.elbow`), and longer ones are cut there. Requests precede
background loads, and the copies in progress are bounded. An idle bus never waits for a larger
group: groups grow only while others are being copied. Torpor (section 4.3) groups parameters in the
same way, without knowing the model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Literal


class Watermark:
    """Ranges that arrive in any order, each once.

    Attributes:
        value: Start of the first gap.
    """

    def __init__(self) -> None:
        self.value = 0
        self._beyond: dict[int, int] = {}

    def add(self, offset: int, nbytes: int) -> int:
        self._beyond[offset] = offset + nbytes
        while (end := self._beyond.pop(self.value, None)) is not None:
            self.value = end
        return self.value


@dataclass(frozen=True)
class Run:
    """One copy: `nbytes` from `address` in host memory to `offset` in the arena.

    Attributes:
        pin: The page-locked range of its source. CUDA refuses a copy across two of them.
    """

    offset: int
    address: int
    nbytes: int
    pin: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def meets(self, following: Run) -> bool:
        return (self.end, self.address + self.nbytes, self.pin) == (following.offset, following.address, following.pin)

    def take_first(self, nbytes: int) -> Run:
        return Run(self.offset, self.address, nbytes, self.pin)

    def drop_first(self, nbytes: int) -> Run:
        return Run(self.offset + nbytes, self.address + nbytes, self.nbytes - nbytes, self.pin)


@dataclass(frozen=True)
class Group:
    """Copies of one arena that are issued and waited for together."""

    arena: int
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


class Ranges:
    """Ranges taken so far, to refuse overlaps."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def take(self, start: int, end: int) -> bool:
        """Take [start, end); False if any byte of it was taken."""
        at = bisect_left(self._starts, start)
        if (at and self._ends[at - 1] > start) or (at < len(self._starts) and self._starts[at] < end):
            return False
        joins_before, joins_after = bool(at) and self._ends[at - 1] == start, at < len(self._starts) and self._starts[at] == end
        if joins_before and joins_after:
            self._ends[at - 1] = self._ends.pop(at)
            del self._starts[at]
        elif joins_before:
            self._ends[at - 1] = end
        elif joins_after:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
        return True


@dataclass
class _Waiting:
    """An arena's ranges that are not being copied yet, by offset; neighbours joined."""

    priority: int
    arrival: int
    runs: list[Run] = field(default_factory=list)
    nbytes: int = 0
    issued: int = 0
    taken: Ranges = field(default_factory=Ranges)


class CopyQueue:
    """The copies of one device's bus.

    The caller numbers the arenas and reuses no number.

    Attributes:
        order: "arrival" copies one arena after the other, "fair" the one with the fewest bytes
            copied; requests before background in both.
        window: Most groups in progress: enough that the bus never idles between two of them.
    """

    def __init__(self, group_bytes: int, window: int = 4, order: Literal["arrival", "fair"] = "arrival") -> None:
        if group_bytes < 1 or window < 1:
            raise ValueError(f"a group of {group_bytes} bytes, {window} at a time: both must be positive")
        self.group_bytes, self.window, self.order = group_bytes, window, order
        self._arenas: dict[int, _Waiting] = {}
        self._arrivals = 0
        self._under_way: list[Group] = []

    @property
    def queued_bytes(self) -> int:
        """Waiting and under way."""
        return sum(a.nbytes for a in self._arenas.values()) + sum(g.nbytes for g in self._under_way)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def open(self, arena: int, priority: int) -> None:
        self._arrivals += 1
        self._arenas[arena] = _Waiting(priority, self._arrivals)

    def priority(self, arena: int) -> int:
        return self._arenas[arena].priority

    def prioritise(self, arena: int, priority: int) -> None:
        self._arenas[arena].priority = priority

    def add(self, arena: int, *runs: Run) -> None:
        """Add `runs`, neighbours in the arena, in order.

        Raises:
            ValueError: They overlap what was added before.
            KeyError: The arena is closed.
        """
        waiting = self._arenas[arena]
        start, end = runs[0].offset, runs[-1].end
        if not waiting.taken.take(start, end):
            raise ValueError(f"bytes {start} to {end} overlap bytes that this arena has received")
        waiting.nbytes += end - start
        for run in runs:
            insort(waiting.runs, run, key=lambda run: run.offset)

    def take_group(self) -> Group | None:
        """Return the group to issue now.

        None while enough is in progress, or if no waiting range is worth its own copy.
        """
        if len(self._under_way) >= self.window:
            return None
        pending: int | None = None
        for number in sorted((n for n, a in self._arenas.items() if a.runs), key=self._rank):
            waiting = self._arenas[number]
            if pending is not None and waiting.priority > self._arenas[pending].priority:
                return self._issue(pending)  # a small group of higher priority still precedes background groups
            if waiting.nbytes >= self.group_bytes or not self._under_way:
                return self._issue(number)
            pending = number if pending is None else pending
        return None

    def finish(self, group: Group) -> None:
        self._under_way.remove(group)

    def drop(self, arena: int) -> None:
        """Remove what waits of an arena; more may be added. A closed arena is fine."""
        if (waiting := self._arenas.get(arena)) is not None:
            waiting.runs.clear()
            waiting.nbytes = 0

    def close(self, arena: int) -> None:
        """Remove the arena and its waiting ranges.

        The caller still reports its groups in progress with `done`.
        """
        self._arenas.pop(arena, None)

    def _issue(self, number: int) -> Group:
        waiting = self._arenas[number]
        group = Group(number, tuple(_take(waiting.runs, self.group_bytes)))
        waiting.nbytes -= group.nbytes
        waiting.issued += group.nbytes
        self._under_way.append(group)
        return group

    def _rank(self, number: int) -> tuple[int, int, int]:
        arena = self._arenas[number]
        return (arena.priority, arena.issued if self.order == "fair" else 0, arena.arrival)


def _take(runs: list[Run], limit: int) -> list[Run]:
    """Take up to `limit` bytes off the front of `runs`, neighbours joined."""
    taken: list[Run] = []
    left = limit
    used = 0
    while left and used < len(runs):
        run = runs[used]
        part = run.take_first(min(run.nbytes, left))
        left -= part.nbytes
        if part.nbytes < run.nbytes:
            runs[used] = run.drop_first(part.nbytes)
        else:
            used += 1
        if taken and taken[-1].meets(part):
            taken[-1] = taken[-1].take_first(taken[-1].nbytes + part.nbytes)
        else:
            taken.append(part)
    del runs[:used]
    return taken
