"""Chunks on their way back: first proved that no other process maps them, then punched or kept. And chunks made ready for loads to come."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.loader.domain.effects import Vacate
from services.loader.domain.events import Event, Left, Vacated
from weights.cache.background import step_back
from weights.pool.memory import PoolMemory
from weights.pool.shm import free_bytes

log = logging.getLogger(__name__)
_AT_ONCE = 4
_WAIT_S = 2.0
"""How long a release waits for its process's mappings to go: a killed process takes a moment."""
_RESCAN_S = 0.1
_STUCK_RESCAN_S = 1.0


class GivingBack:
    """`emit` is called from the threads: `Vacated` as soon as it is proved, `Left` within a bounded time."""

    def __init__(self, pool: PoolMemory, emit: Callable[[Event], None], wait: float = _WAIT_S) -> None:
        self._pool, self._emit, self._wait = pool, emit, wait
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="give-back")
        self._readiness = ThreadPoolExecutor(1, thread_name_prefix="ready", initializer=step_back)
        self._stuck: dict[int, Vacate] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._watch: threading.Thread | None = None

    def start(self, order: Vacate, before: Callable[[], int] = lambda: 0) -> None:
        """`before` is called first, in the thread: it ends what this process itself may still do with the memory, and tells the
        bytes of devices that were given back with it."""
        if order.nbytes:
            self._threads.submit(self._give_back, order, before)
        else:
            self._readiness.submit(self._make_ready, order)

    def close(self) -> None:
        """Wait for what is under way. Chunks that are still mapped are found again at the next start."""
        self._closing.set()
        self._threads.shutdown()
        self._readiness.shutdown()
        if self._watch is not None:
            self._watch.join()

    def _give_back(self, order: Vacate, before: Callable[[], int]) -> None:
        on_devices = 0
        try:
            on_devices = before()
            if self._unmapped(order):
                self._done(order, on_devices)
                return
            log.warning("weights that were let go are still mapped", extra={"run": order.run, "pids": self._mappers(order)})
            if order.weights_id is not None:
                self._emit(Left(order.weights_id, order.run, 0, on_devices=on_devices))
            with self._lock:
                self._stuck[order.run] = order
                if self._watch is None:
                    self._watch = threading.Thread(target=self._watch_stuck, name="stuck", daemon=True)
                    self._watch.start()
        except OSError:
            log.exception("memory of the pool could not be given back; these chunks stay out of use", extra={"run": order.run})
            if order.weights_id is not None:
                self._emit(Left(order.weights_id, order.run, 0, on_devices=on_devices))

    def _done(self, order: Vacate, on_devices: int = 0, *, told: bool = True) -> None:
        freed = self._pool.punch(order.chunks[order.keep :])
        for chunk in order.chunks[: order.keep]:
            self._pool.prepare(chunk)
        self._emit(Vacated(order.run, free_bytes()))
        if order.weights_id is not None and told:
            self._emit(Left(order.weights_id, order.run, freed, order.nbytes - freed if order.keep else 0, on_devices))

    def _make_ready(self, order: Vacate) -> None:
        """Nobody maps chunks that were free."""
        made = 0
        try:
            while made < order.keep and not self._closing.is_set():
                self._pool.prepare_huge(order.chunks[made])
                made += 1
        except OSError as e:
            log.warning("memory for loads to come could not be had", extra={"chunks": order.keep - made, "error": str(e)})
            self._pool.punch(order.chunks[made:])
        self._emit(Vacated(order.run, free_bytes(), made if made < order.keep else None))

    def _unmapped(self, order: Vacate) -> bool:
        deadline = time.monotonic() + self._wait
        while mappers := self._mappers(order):
            left = deadline - time.monotonic()
            if left <= 0 or self._closing.is_set():
                return False
            _await_exit(mappers, min(left, _RESCAN_S))
        return True

    def _mappers(self, order: Vacate) -> list[int]:
        mapped = self._pool.mapped_by_others()
        return sorted({pid for chunk in order.chunks for pid in mapped.get(chunk, ())})

    def _watch_stuck(self) -> None:
        """Nothing tells when a living process unmaps: it is looked for now and then."""
        while not self._closing.wait(_STUCK_RESCAN_S):
            with self._lock:
                waiting = list(self._stuck.values())
            if not waiting:
                continue
            mapped = self._pool.mapped_by_others()
            for order in waiting:
                if not any(c in mapped for c in order.chunks):
                    with self._lock:
                        del self._stuck[order.run]
                    try:
                        self._done(order, told=False)
                    except OSError:
                        log.exception(
                            "memory of the pool could not be given back; these chunks stay out of use", extra={"run": order.run}
                        )


def _await_exit(pids: list[int], within: float) -> None:
    """Wait until one of `pids` has ended, at most `within` seconds (a process may also unmap and live on: nothing tells of that)."""
    fds: list[int] = []
    try:
        fds.extend(os.pidfd_open(pid) for pid in pids)
        waiting = select.poll()  # select() takes no descriptor above 1023
        for fd in fds:
            waiting.register(fd, select.POLLIN)
        waiting.poll(within * 1e3)
    except ProcessLookupError:  # one has ended already
        return
    finally:
        for fd in fds:
            os.close(fd)
