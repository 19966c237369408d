"""Host memory as a device: engines map the pool's chunks. Nothing is copied."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shared.contracts.segment import SharedMemoryHandle
from weights.devices.grouping import Ranges, Watermark
from weights.devices.port import Place, Priority


class CpuArena:
    """A segment of the pool, filled in place; `fill` only records the loaded bytes."""

    def __init__(self, device_id: str, place: Place, released: Callable[[CpuArena], None]) -> None:
        self._device_id, self._place, self._released = device_id, place, released
        self._watermark, self._taken = Watermark(), Ranges()
        self._changed = threading.Condition()
        self._open = True

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    @property
    def watermark(self) -> int:
        with self._changed:
            return self._watermark.value

    def fill(self, offset: int, address: int, nbytes: int) -> None:
        check_range(self._place, offset, nbytes)
        with self._changed:
            if not self._open:
                return
            if not self._taken.take(offset, offset + nbytes):
                raise ValueError(f"bytes {offset} to {offset + nbytes} overlap bytes that this arena has received")
            self._watermark.add(offset, nbytes)
            self._changed.notify_all()

    def wait(self, until: int, cancelled: threading.Event | None = None) -> bool:
        return wait_for(self._changed, lambda: self._watermark.value >= until, lambda: not self._open, cancelled)

    def handle(self) -> SharedMemoryHandle:
        return SharedMemoryHandle(
            device=self._device_id,
            nbytes=self._place.nbytes,
            segment=self._place.segment,
            extents=self._place.extents,
        )

    def raise_priority(self, priority: Priority) -> None:
        """Do nothing: there are no copies."""

    def release(self) -> int:
        """Release nothing: the pool owns the memory."""
        with self._changed:
            if not self._open:
                return 0
            self._open = False
            self._changed.notify_all()
        self._released(self)
        return self._place.nbytes


class CpuDevice:
    def __init__(self, device_id: str = "cpu:0") -> None:
        self._device_id = device_id
        self._lock = threading.Lock()
        self._arenas: list[CpuArena] = []

    @property
    def device_id(self) -> str:
        return self._device_id

    @property
    def link(self) -> str | None:
        return None

    @property
    def group_bytes(self) -> int | None:
        return None

    @property
    def queued_bytes(self) -> int:
        return 0

    @property
    def copied_bytes(self) -> int:
        return 0

    @property
    def bytes_per_second(self) -> float | None:
        return None

    def pin(self, address: int, nbytes: int) -> None:
        """Engines on the CPU read pages as they are."""

    def unpin(self, address: int) -> None:
        """Do nothing: no memory was pinned."""

    def allocate(self, place: Place, priority: Priority = Priority.REQUEST) -> CpuArena:
        arena = CpuArena(self._device_id, place, self._forget)
        with self._lock:
            self._arenas.append(arena)
        return arena

    def close(self) -> None:
        with self._lock:
            arenas = list(self._arenas)
        for arena in arenas:
            arena.release()

    def _forget(self, arena: CpuArena) -> None:
        with self._lock:
            self._arenas.remove(arena)


def check_range(place: Place, offset: int, nbytes: int) -> None:
    if offset < 0 or nbytes <= 0 or offset + nbytes > place.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a segment of {place.nbytes} bytes")


_POLL_INTERVAL_S = 0.05
"""Poll interval in seconds for `cancelled`: the caller's event wakes no waiter here."""


def wait_for(
    changed: threading.Condition, done: Callable[[], bool], ended: Callable[[], bool], cancelled: threading.Event | None
) -> bool:
    """Wait until `done` (True), or `ended` or `cancelled` (False).

    Both functions are called with the condition held.
    """
    with changed:
        while not done():
            if ended() or (cancelled is not None and cancelled.is_set()):
                return False
            changed.wait(None if cancelled is None else _POLL_INTERVAL_S)
        return True
