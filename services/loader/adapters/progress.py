"""How far loads are: told to the loop now and then, and the last that is known of each always."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, Fetched, Progressed

INTERVAL_S = 0.02


@dataclass
class _Told:
    order: StartRun
    remote: bool
    latest: int = 0
    told: int = -1
    at: float = 0.0


class Progress:
    """`emit` is called from the threads that load, for what comes within the interval after the last time from a thread of its own: a load
    whose bytes stop coming is not waited for by those who could use what is there."""

    def __init__(self, emit: Callable[[Event], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._clock = emit, clock
        self._runs: dict[int, _Told] = {}
        self._lock = threading.Lock()
        self._late, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, order: StartRun, *, remote: bool) -> None:
        with self._lock:
            self._runs[order.run] = _Told(order, remote)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tell_late, name="progress", daemon=True)
                self._thread.start()

    def loaded(self, run: int, watermark: int) -> None:
        """Every byte of the run's segment below `watermark` is there."""
        now = self._clock()
        with self._lock:
            found = self._runs.get(run)
            if found is None or watermark <= found.latest:
                return
            found.latest = watermark
            if now - found.at < INTERVAL_S:
                self._late.set()
                return
            self._tell(found, now)

    def over(self, run: int) -> None:
        """Whoever loaded tells the rest."""
        with self._lock:
            self._runs.pop(run, None)

    def close(self) -> None:
        self._closing.set()
        self._late.set()
        if self._thread is not None:
            self._thread.join()

    def _tell(self, found: _Told, now: float) -> None:
        found.told, found.at = found.latest, now
        self._emit(Progressed(found.order.weights_id, found.order.run, found.latest))
        if found.remote:
            self._emit(Fetched(found.order.weights_id, found.order.run, found.latest))

    def _tell_late(self) -> None:
        while True:
            self._late.wait()
            self._late.clear()  # before the look at `closing`: afterwards it would undo the wake-up of `close`
            if self._closing.wait(INTERVAL_S):
                return
            with self._lock:
                for found in self._runs.values():
                    if found.told < found.latest:
                        self._tell(found, self._clock())
