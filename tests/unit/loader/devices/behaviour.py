"""Required behaviour of every device, inherited by the tests of each."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from weights.devices.port import Arena, Device, Place, Priority

PAGE = mmap.PAGESIZE
SEGMENT = 40 * PAGE + 123


@dataclass
class Host:
    """Page-aligned memory with random bytes, as a chunk of the pool."""

    nbytes: int = SEGMENT
    memory: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        self.memory = mmap.mmap(-1, -(-self.nbytes // PAGE) * PAGE)
        self.content = random.Random(self.nbytes).randbytes(self.nbytes)
        self.memory[: self.nbytes] = self.content
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)


class DeviceBehaviour:
    """Tests of every device.

    Attributes:
        RELEASED: Bytes that releasing an arena gives back.
    """

    RELEASED = SEGMENT

    def read(self, arena: Arena, nbytes: int) -> bytes:
        """Return what an engine reads through the arena's handle."""
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> Device:
        raise NotImplementedError

    @pytest.fixture
    def host(self, device: Device) -> Iterator[Host]:
        host = Host()
        device.pin(host.address, len(host.memory))
        yield host
        device.unpin(host.address)

    @pytest.fixture
    def arena(self, device: Device) -> Arena:
        return device.allocate(Place("w", SEGMENT, "thaw-test"))

    def test_bytes_arrive_in_any_order_and_the_watermark_follows(self, arena: Arena, host: Host) -> None:
        cuts = [0, *sorted(random.Random(7).sample(range(1, SEGMENT), 30)), SEGMENT]
        ranges = list(itertools.pairwise(cuts))
        first = ranges.pop(0)
        random.Random(1).shuffle(ranges)
        for start, end in ranges:
            arena.fill(start, host.address + start, end - start)
        assert arena.watermark == 0
        arena.fill(0, host.address, first[1])
        assert arena.wait(SEGMENT)
        assert arena.watermark == SEGMENT
        self.check(arena, host)

    def check(self, arena: Arena, host: Host) -> None:
        assert self.read(arena, SEGMENT) == host.content

    def test_a_reader_may_wait_for_the_first_bytes_only(self, arena: Arena, host: Host) -> None:
        waited: list[bool] = []
        reader = threading.Thread(target=lambda: waited.append(arena.wait(2 * PAGE)))
        reader.start()
        arena.fill(0, host.address, PAGE)
        arena.fill(PAGE, host.address + PAGE, PAGE)
        reader.join(60)
        assert waited == [True]
        assert arena.watermark == 2 * PAGE

    def test_cancelled_wait_returns(self, arena: Arena) -> None:
        cancelled = threading.Event()
        threading.Timer(0.05, cancelled.set).start()
        assert arena.wait(1, cancelled) is False

    def test_wait_ends_when_the_arena_is_released(self, arena: Arena) -> None:
        waited: list[bool] = []
        waiter = threading.Thread(target=lambda: waited.append(arena.wait(1)))
        waiter.start()
        assert arena.release() == self.RELEASED
        waiter.join(60)
        assert waited == [False]

    def test_second_release_and_later_fills_have_no_effect(self, arena: Arena, host: Host) -> None:
        assert arena.release() == self.RELEASED
        assert arena.release() == 0
        arena.fill(0, host.address, PAGE)
        assert arena.watermark == 0

    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 0), (SEGMENT - 1, 2), (SEGMENT, 1)])
    def test_a_range_outside_the_segment_is_refused(self, arena: Arena, host: Host, offset: int, nbytes: int) -> None:
        with pytest.raises(ValueError, match="are outside a segment"):
            arena.fill(offset, host.address, nbytes)

    def test_duplicate_range_is_refused(self, arena: Arena, host: Host) -> None:
        arena.fill(PAGE, host.address, PAGE)
        with pytest.raises(ValueError, match="overlap bytes"):
            arena.fill(2 * PAGE - 1, host.address, PAGE)

    def test_many_arenas_and_both_priorities(self, device: Device, host: Host) -> None:
        arenas = [device.allocate(Place(str(n), SEGMENT, "thaw-test"), Priority(n % 2)) for n in range(4)]
        for arena in arenas:
            arena.raise_priority(Priority.REQUEST)
            for start in range(0, SEGMENT, 4 * PAGE):
                arena.fill(start, host.address + start, min(4 * PAGE, SEGMENT - start))
        for arena in arenas:
            assert arena.wait(SEGMENT)
            self.check(arena, host)
            arena.release()
        assert device.queued_bytes == 0

    def test_closing_the_device_releases_all_arenas(self, device: Device, arena: Arena) -> None:
        device.close()
        assert arena.release() == 0
