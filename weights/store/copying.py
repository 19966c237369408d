"""The thread that hashes units in host memory and copies them into a device's pages."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from heapq import heappop
from typing import Protocol

from shared.errors import CheckpointInvalid, DeviceFailed, InsufficientMemory, ThawError
from weights.devices.pacing import Pacer
from weights.store.arena import PagedArena
from weights.store.memory import UnitMemory
from weights.store.missing import digests_of
from weights.store.pages import StoredUnit
from weights.store.units import content_key

log = logging.getLogger(__name__)
_RATE_WEIGHT = 0.2


class Target(Protocol):
    """The device whose units are copied. Its lock, `changed`, is held for every call."""

    @property
    def device_id(self) -> str: ...

    @property
    def changed(self) -> threading.Condition: ...

    def find_unit(self, key: str) -> StoredUnit | None:
        """Return a unit of the store."""
        ...

    def count_changed(self) -> None:
        """Count a unit with other bytes than those that it was loaded with."""
        ...

    def reserve_ahead(self, arena: PagedArena, index: int) -> None:
        """Reserve pages for a unit of the arena; wait for KV caches to return some if necessary."""
        ...

    def settle(
        self, arena: PagedArena, index: int, key: str, digests: Mapping[str, str], *, copied_bytes: int, is_from_peer: bool = False
    ) -> None:
        """Complete a unit under the key of its content."""
        ...


class CopyThread:
    """Copies the ready units of all arenas, requests before background loads.

    Attributes:
        bytes_per_second: Bandwidth of the latest copies, hashing included; None before the first.
        copied_bytes: Bytes of all copies.
    """

    def __init__(
        self,
        target: Target,
        memory: UnitMemory,
        arenas: Mapping[str, PagedArena],
        clock: Callable[[], float] = time.monotonic,
        pacer: Pacer | None = None,
    ) -> None:
        """Start the thread.

        Args:
            arenas: The open arenas by holder, guarded by the device's lock.
            pacer: Slows copies down, for experiments.
        """
        self._target, self._memory, self._arenas, self._clock, self._pacer = target, memory, arenas, clock, pacer
        self.bytes_per_second: float | None = None
        self.copied_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"copy-{target.device_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. No arena is open any more."""
        with self._target.changed:
            self._closing = True
            self._target.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        changed = self._target.changed
        while True:
            with changed:
                while (arena := self._choose()) is None:
                    if self._closing:
                        return
                    changed.wait()
                _, index = heappop(arena.ready)
                if index not in arena.missing or arena.missing[index].is_under_way:
                    continue  # the unit is copied from another device
                arena.missing[index].is_under_way = True
                arena.under_way += 1
            error: ThawError | None = None
            try:
                self._copy(arena, index)
            except ThawError as e:
                error = e
            except OSError as e:
                error = _failure(self._target.device_id, e)
            except Exception as e:  # the thread's boundary: waiters need an answer
                log.exception("failed to copy a unit", extra={"device": self._target.device_id})
                error = DeviceFailed(f"{self._target.device_id}: {type(e).__name__}: {e}")
            with changed:
                arena.under_way -= 1
                arena.error = arena.error or error
                if arena.error is not None:
                    arena.ready.clear()
                changed.notify_all()

    def _choose(self) -> PagedArena | None:
        waiting = [a for a in self._arenas.values() if a.ready]
        return min(waiting, key=lambda a: (a.priority, int(a.holder.removeprefix("arena-"))), default=None)

    def _copy(self, arena: PagedArena, index: int) -> None:
        """Share the unit's content if the device has it, otherwise copy it."""
        began, missing = self._clock(), arena.missing[index]
        digests = digests_of(missing)
        key = content_key(missing.unit.offset, missing.tensors, digests)
        if missing.unit.key.startswith("sha256:") and key != missing.unit.key:
            contents = arena.place.contents
            if contents is not None and contents.must_match:
                raise CheckpointInvalid(
                    f"Weights of {contents.model} differ from the hashes in their index. Convert or download the model again"
                )
            log.warning(
                "weights differ from the hashes in their index",
                extra={"device": self._target.device_id, "weights": arena.place.weights_id},
            )
        with self._target.changed:
            # Under the same lock: without it another thread may reclaim the content.
            if self._target.find_unit(key) is not None:
                self._target.settle(arena, index, key, digests, copied_bytes=0)
                return
            if not missing.has_pages:
                self._target.reserve_ahead(arena, index)
            stored = self._target.find_unit(missing.key)
            if stored is None:
                return  # the arena was released meanwhile
        for offset, address, nbytes in missing.pieces:
            self._memory.write(stored, offset - missing.unit.offset, address, nbytes)
        if self._pacer is not None:
            self._wait(arena, self._pacer.book(missing.unit.nbytes, began))
        rate = missing.unit.nbytes / max(self._clock() - began, 1e-9)
        self.copied_bytes += missing.unit.nbytes
        self.bytes_per_second = update_rate(self.bytes_per_second, rate)
        with self._target.changed:
            self._target.settle(arena, index, key, digests, copied_bytes=missing.unit.nbytes)

    def _wait(self, arena: PagedArena, until: float) -> None:
        """Wait for the paced link, or until the arena is released."""
        with self._target.changed:
            while arena.is_open and (left := until - self._clock()) > 0:
                self._target.changed.wait(left)


def update_rate(known: float | None, rate: float) -> float:
    """Return a link's bandwidth after one more copy at `rate`."""
    return rate if known is None else known + _RATE_WEIGHT * (rate - known)


def _failure(device_id: str, error: OSError) -> ThawError:
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return InsufficientMemory(
            f"The host has no memory for the pages of {device_id}: lower the devices' sizes, or enlarge /dev/shm", should_retry=True
        )
    return DeviceFailed(f"{device_id}: {error}")
