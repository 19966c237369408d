"""Manage a CUDA device: arenas, the copying thread, and page-locked host memory.

One thread keeps the device's bus busy.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from shared.contracts.segment import CudaIpcHandle
from shared.errors import DeviceFailed, ThawError
from weights.devices.cpu import check_range, wait_for
from weights.devices.driver import CudaDriver, DeviceFacts, Event, Stream
from weights.devices.grouping import CopyQueue, Group, Watermark
from weights.devices.pinning import Pins
from weights.devices.port import Place, Priority

log = logging.getLogger(__name__)
GRANULE = 2 * 1024 * 1024
"""Smaller allocations may share a block of the driver; an IPC handle refers to a whole block."""
_RATE_WEIGHT = 0.2


class CudaArena:
    """`place.nbytes` at `address` on the device.

    The device's thread moves its watermark.
    """

    def __init__(self, device: CudaDevice, number: int, place: Place, address: int) -> None:
        self._device, self.number, self._place, self.address = device, number, place, address
        self.changed = threading.Condition()
        self._watermark = Watermark()
        self._error: ThawError | None = None
        self.under_way = 0
        self._open = True

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    @property
    def watermark(self) -> int:
        with self.changed:
            return self._watermark.value

    def fill(self, offset: int, address: int, nbytes: int) -> None:
        check_range(self._place, offset, nbytes)
        with self.changed:
            if self._error is not None:
                raise self._error
            if not self._open:
                return
        self._device.enqueue(self, offset, address, nbytes)

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        def is_done() -> bool:
            if self._error is not None:
                raise self._error
            return self._watermark.value >= until

        return wait_for(self.changed, is_done, lambda: not self._open, cancelled)

    def handle(self) -> CudaIpcHandle:
        return CudaIpcHandle(
            device=self._device.device_id,
            nbytes=self._place.nbytes,
            bus_id=self._device.facts.bus_id,
            ipc_handle=base64.b64encode(self._device.export(self.address)).decode(),
        )

    def raise_priority(self, priority: Priority) -> None:
        self._device.prioritise(self, priority)

    def release(self) -> int:
        with self.changed:
            if not self._open:
                return 0
            self._open = False
            self.changed.notify_all()
        self._device.remove(self)
        return self._place.nbytes

    def on_copy_started(self) -> None:
        with self.changed:
            self.under_way += 1

    def on_copied(self, group: Group) -> None:
        with self.changed:
            for run in group.runs:
                self._watermark.add(run.offset, run.nbytes)
            self.under_way -= 1
            self.changed.notify_all()

    def on_copy_failed(self, error: ThawError) -> None:
        with self.changed:
            self._error = self._error or error
            self.under_way -= 1
            self.changed.notify_all()


class CudaDevice:
    """A CUDA device.

    Attributes:
        pins: May be shared by the devices of a process.
    """

    def __init__(
        self,
        driver: CudaDriver,
        facts: DeviceFacts,
        group_bytes: int,
        *,
        pins: Pins | None = None,
        order: Literal["arrival", "fair"] = "arrival",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self.facts, self._clock = driver, facts, clock
        self._pins = pins if pins is not None else Pins(driver)
        self._queue = CopyQueue(group_bytes, order=order)
        self._arenas: dict[int, CudaArena] = {}
        self._numbers = 0
        self._rate: float | None = None
        self._copied_bytes = 0
        self._work = threading.Condition()
        self._closing = False
        driver.use(facts.index)
        self._streams = {Priority.REQUEST: driver.stream(urgent=True), Priority.BACKGROUND: driver.stream(urgent=False)}
        self._thread = threading.Thread(target=self._copy, name=f"copy-{self.device_id}", daemon=True)
        self._thread.start()

    @property
    def device_id(self) -> str:
        return f"cuda:{self.facts.index}"

    @property
    def link(self) -> str | None:
        return f"bus:{self.device_id}"

    @property
    def group_bytes(self) -> int:
        return self._queue.group_bytes

    @property
    def queued_bytes(self) -> int:
        with self._work:
            return self._queue.queued_bytes

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes

    @property
    def bytes_per_second(self) -> float | None:
        return self._rate

    def pin(self, address: int, nbytes: int) -> None:
        self._driver.use(self.facts.index)
        self._pins.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        self._pins.unpin(address)

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> CudaArena:
        self._driver.use(self.facts.index)
        address = self._driver.allocate(-(-place.nbytes // GRANULE) * GRANULE)
        with self._work:
            self._numbers += 1
            arena = self._arenas[self._numbers] = CudaArena(self, self._numbers, place, address)
            self._queue.open(arena.number, priority)
        return arena

    def close(self) -> None:
        for arena in list(self._arenas.values()):
            arena.release()
        with self._work:
            if self._closing:
                return
            self._closing = True
            self._work.notify_all()
        self._thread.join()
        with contextlib.suppress(DeviceFailed):  # what a broken context keeps goes with the process
            self._driver.use(self.facts.index)
            for stream in self._streams.values():
                self._driver.destroy_stream(stream)
            self._pins.close()

    def export(self, address: int) -> bytes:
        self._driver.use(self.facts.index)
        return self._driver.export(address)

    def enqueue(self, arena: CudaArena, offset: int, address: int, nbytes: int) -> None:
        runs = self._pins.runs(offset, address, nbytes)
        with self._work:
            if arena.number in self._arenas:
                self._queue.add(arena.number, *runs)
                self._work.notify_all()

    def prioritise(self, arena: CudaArena, priority: Priority) -> None:
        with self._work:
            if arena.number in self._arenas:
                self._queue.prioritise(arena.number, priority)

    def remove(self, arena: CudaArena) -> None:
        """Remove an arena after its copies in progress: its memory may be reused then."""
        with self._work:
            del self._arenas[arena.number]
            self._queue.close(arena.number)
        with arena.changed:
            arena.changed.wait_for(lambda: arena.under_way == 0)
        self._driver.use(self.facts.index)
        self._driver.free(arena.address)

    def _copy(self) -> None:
        """Run the device's thread: issue queued copies, else wait for the oldest copy."""
        self._driver.use(self.facts.index)
        under_way: deque[tuple[Group, CudaArena, Event, float]] = deque()
        ended = self._clock()
        while True:
            with self._work:
                while (group := self._queue.take_group()) is None and not under_way:
                    if self._closing:
                        return
                    self._work.wait()
                arena = self._arenas[group.arena] if group is not None else None
                if group is not None and arena is not None:
                    arena.on_copy_started()
                    stream = self._streams[Priority(self._queue.priority(group.arena))]
            if group is not None and arena is not None:
                issued = self._issue(group, arena, stream)
                if issued is not None:
                    under_way.append((group, arena, issued, self._clock()))
                continue
            ended = self._finish(*under_way.popleft(), ended)

    def _issue(self, group: Group, arena: CudaArena, stream: Stream) -> Event | None:
        try:
            for run in group.runs:
                self._driver.copy(arena.address + run.offset, run.address, run.nbytes, stream)
            return self._driver.record(stream)
        except Exception as e:  # the thread's boundary: waiters need an answer
            with contextlib.suppress(Exception):  # a part of the group may be on its way
                self._driver.wait(self._driver.record(stream))
            self._fail_copy(group, arena, e)
            return None

    def _finish(self, group: Group, arena: CudaArena, event: Event, issued: float, previous: float) -> float:
        """Wait for the group, update the measured rate, and return the time.

        Groups use the bus in order, so this one began when the previous one ended.
        """
        try:
            self._driver.wait(event)
        except Exception as e:
            self._fail_copy(group, arena, e)
            return self._clock()
        now = self._clock()
        with self._work:
            self._queue.finish(group)
        self._copied_bytes += group.nbytes
        rate = group.nbytes / max(now - max(issued, previous), 1e-9)
        self._rate = rate if self._rate is None else self._rate + _RATE_WEIGHT * (rate - self._rate)
        arena.on_copied(group)
        return now

    def _fail_copy(self, group: Group, arena: CudaArena, error: Exception) -> None:
        failure = error if isinstance(error, DeviceFailed) else DeviceFailed(str(error) or type(error).__name__)
        log.error("a copy to a device failed", extra={"device": self.device_id, "bytes": group.nbytes, "error": failure.message})
        with self._work:
            self._queue.finish(group)
            self._queue.drop(group.arena)
        arena.on_copy_failed(failure)
