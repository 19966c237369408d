"""Send the progress of loads to the loop, at most once per interval.

A report is never older than that interval.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, Fetched, Progressed

INTERVAL_S = 0.02


@dataclass
class _RunProgress:
    order: StartRun
    remote: bool
    latest: tuple[int, int] = (0, 0)
    """Watermark, and bytes that have arrived."""
    published: tuple[int, int] = (-1, -1)
    at: float = 0.0


class Progress:
    """Rate limiter of progress events.

    A thread of its own sends values that arrived within the interval, so that readers get the last
    bytes of a load that stalls.

    Args:
        emit: Called from the loading threads.
        clock: Monotonic seconds.
    """

    def __init__(self, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._clock = emit, clock
        self._runs: dict[int, _RunProgress] = {}
        self._lock = threading.Lock()
        self._deferred, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, order: StartRun, *, remote: bool) -> None:
        with self._lock:
            self._runs[order.run] = _RunProgress(order, remote)
            if self._thread is None:
                self._thread = threading.Thread(target=self._publish_deferred, name="progress", daemon=True)
                self._thread.start()

    def record_loaded(self, run: int, watermark: int, arrived: int) -> None:
        """Record that every byte of the run's segment below `watermark` is loaded.

        Args:
            arrived: Bytes loaded in any order.
        """
        now = self._clock()
        with self._lock:
            found = self._runs.get(run)
            if found is None:
                return
            before = found.latest
            found.latest = (max(watermark, before[0]), max(arrived, before[1]))
            if found.latest == before:
                return
            if now - found.at < INTERVAL_S:
                self._deferred.set()
                return
            self._publish(found, now)

    def end(self, run: int) -> None:
        """Stop reporting the run; `Completed` or `Failed` follows."""
        with self._lock:
            self._runs.pop(run, None)

    def close(self) -> None:
        self._closing.set()
        self._deferred.set()
        if self._thread is not None:
            self._thread.join()

    def _publish(self, found: _RunProgress, now: float) -> None:
        found.published, found.at = found.latest, now
        watermark, arrived = found.latest
        self._emit(Progressed(found.order.weights_id, found.order.run, watermark, arrived))
        if found.remote:
            self._emit(Fetched(found.order.weights_id, found.order.run, max(watermark, arrived)))

    def _publish_deferred(self) -> None:
        while True:
            self._deferred.wait()
            self._deferred.clear()  # before the check of `closing`: afterwards it would undo the wake-up of `close`
            if self._closing.wait(INTERVAL_S):
                return
            with self._lock:
                for found in self._runs.values():
                    if found.published != found.latest:
                        self._publish(found, self._clock())
