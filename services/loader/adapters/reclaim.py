"""Reclaim chunks that no other process maps, and populate chunks for future loads."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader.domain.effects import Vacate
from services.loader.domain.events import Event, Reclaimed, Vacated, VacateFailed
from weights.cache.background import lower_thread_priority
from weights.pool.memory import PoolMemory
from weights.pool.shm import free_bytes

log = logging.getLogger(__name__)
_RECLAIM_THREADS = 4
_WAIT_S = 2.0
"""Time for a process to unmap released chunks; a killed process takes a moment."""
_RESCAN_S = 0.1
_STUCK_RESCAN_S = 1.0
"""Interval at which chunks that stayed mapped beyond `_WAIT_S` are checked again."""


class Reclaimer:
    """Threads that reclaim and populate chunks."""

    def __init__(self, pool: PoolMemory, emit: Callable[[Event], None], wait: float = _WAIT_S) -> None:
        """Create a reclaimer.

        Args:
            pool: The memory of the chunks.
            emit: Receives events from the threads: `Vacated` as soon as no process maps the chunks,
                and `Reclaimed` within a bounded time.
            wait: Seconds that processes have to unmap released chunks, before `Reclaimed` reports
                that no memory is free yet.
        """
        self._pool, self._emit, self._wait = pool, emit, wait
        self._threads = ThreadPoolExecutor(_RECLAIM_THREADS, thread_name_prefix="reclaim")
        self._prepare_threads = ThreadPoolExecutor(1, thread_name_prefix="populate", initializer=lower_thread_priority)
        self._stuck: dict[int, Vacate] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._watch: threading.Thread | None = None

    def start(self, order: Vacate, before: Callable[[], int] = lambda: 0) -> None:
        """Perform `order` in a thread.

        Args:
            order: Without bytes to reclaim, it only populates chunks.
            before: Called first: ends this process's own use of the memory, and returns the bytes
                of device memory that this released.
        """
        if order.nbytes:
            self._threads.submit(self._reclaim, order, before)
        else:
            self._prepare_threads.submit(self._prepare_chunks, order)

    def close(self) -> None:
        """Wait for running orders. The next loader process finds chunks that are still mapped."""
        self._closing.set()
        self._threads.shutdown()
        self._prepare_threads.shutdown()
        if self._watch is not None:
            self._watch.join()

    def _reclaim(self, order: Vacate, before: Callable[[], int]) -> None:
        on_devices = 0
        try:
            on_devices = before()
            if self._wait_until_unmapped(order):
                self._free_chunks(order, on_devices)
                return
            log.warning("released weights are still mapped", extra={"run": order.run, "pids": self._mappers(order)})
            if order.weights_id is not None:
                self._emit(Reclaimed(order.weights_id, order.run, 0, on_devices=on_devices))
            with self._lock:
                self._stuck[order.run] = order
                if self._watch is None:
                    self._watch = threading.Thread(target=self._watch_stuck, name="stuck", daemon=True)
                    self._watch.start()
        except OSError:
            log.exception("failed to reclaim pool memory; these chunks stay unused", extra={"run": order.run})
            self._emit(VacateFailed(order.run, free_bytes()))
            if order.weights_id is not None:
                self._emit(Reclaimed(order.weights_id, order.run, 0, on_devices=on_devices))

    def _free_chunks(self, order: Vacate, on_devices: int = 0, *, notify: bool = True) -> None:
        freed = self._pool.punch(order.chunks[order.keep :])
        made = 0
        try:
            for chunk in order.chunks[: order.keep]:
                self._pool.prepare(chunk)  # a cancelled or failed load has not populated all of them
                made += 1
        except OSError as e:
            self._log_unpopulated(order.keep - made, e)
            freed += self._pool.punch(order.chunks[made : order.keep])
        self._emit(Vacated(order.run, free_bytes(), made if made < order.keep else None))
        if order.weights_id is not None and notify:
            self._emit(Reclaimed(order.weights_id, order.run, freed, made * self._pool.chunk_bytes, on_devices))

    def _prepare_chunks(self, order: Vacate) -> None:
        """Populate free chunks, which no process maps."""
        made = 0
        try:
            while made < order.keep and not self._closing.is_set():
                self._pool.prepare_huge(order.chunks[made])
                made += 1
        except OSError as e:
            self._log_unpopulated(order.keep - made, e)
            self._pool.punch(order.chunks[made:])
        self._emit(Vacated(order.run, free_bytes(), made if made < order.keep else None))

    def _log_unpopulated(self, chunks: int, error: OSError) -> None:
        log.warning("failed to populate memory for future loads", extra={"chunks": chunks, "error": str(error)})

    def _wait_until_unmapped(self, order: Vacate) -> bool:
        deadline = time.monotonic() + self._wait
        while self._pool.mapped_among(order.chunks):
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set():
                return False
            _await_exit(self._mappers(order), min(left, _RESCAN_S))
        return True

    def _mappers(self, order: Vacate) -> list[int]:
        """Return the processes that map its chunks, of those that this one may inspect."""
        mapped = self._pool.mapped_by_others()
        return sorted({pid for chunk in order.chunks for pid in mapped.get(chunk, ())})

    def _watch_stuck(self) -> None:
        """Poll the mappings: the kernel has no event for an unmap by a living process."""
        while not self._closing.wait(_STUCK_RESCAN_S):
            with self._lock:
                waiting = list(self._stuck.values())
            if not waiting:
                continue
            for order in waiting:
                self._reclaim_stuck(order)

    def _reclaim_stuck(self, order: Vacate) -> None:
        try:
            if self._pool.mapped_among(order.chunks):
                return
        except OSError as e:
            log.warning("failed to find the processes that map released weights; retrying", extra={"error": str(e)})
            return
        with self._lock:
            del self._stuck[order.run]
        try:
            self._free_chunks(order, notify=False)
        except OSError:
            log.exception("failed to reclaim pool memory; these chunks stay unused", extra={"run": order.run})
            self._emit(VacateFailed(order.run, free_bytes()))


def _await_exit(pids: list[int], within: float) -> None:
    """Wait until one of `pids` has exited, at most `within` seconds.

    A process may also unmap without exiting, which has no event.
    """
    fds: list[int] = []
    try:
        fds.extend(os.pidfd_open(pid) for pid in pids)
        waiting = select.poll()  # select() takes no descriptor above 1023
        for fd in fds:
            waiting.register(fd, select.POLLIN)
        waiting.poll(within * 1e3)
    except ProcessLookupError:  # one has exited already
        return
    finally:
        for fd in fds:
            os.close(fd)
